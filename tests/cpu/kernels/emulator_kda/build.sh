set -e
W=${1:-/tmp/wt-kdakern}
cd /tmp/kda-emulator; rm -rf src; python3 prepare.py $W/kernels > /dev/null
PY=$W/.venv/bin/python
CUDA=$(PYTHONPATH=$W $PY -c "from tfla_tk.build.toolchain import find_toolchain as f; print(f().include)" 2>/dev/null)
PYI=$($PY -c "import sysconfig; print(sysconfig.get_path('include'))")
g++ -std=c++20 -O2 -ffp-contract=off -fno-strict-aliasing -fPIC -shared -w -Istand -Isrc -I$CUDA -I$PYI kda.cpp -ldl -o kda.so
g++ -std=c++20 -O1 -fPIC -shared -w -I$W/kernels -I$CUDA -I$PYI $W/kernels/common/launcher_module.cpp -ldl -o tfla_launcher_module.so
