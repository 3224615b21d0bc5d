set -e
W=/tmp/wt-kdakern; D=/tmp/kda-emulator/t; rm -rf $D; mkdir -p $D/tests/gpu
cp $W/tests/gpu/{accuracy,linear,memory,test_kda}.py $D/tests/gpu/; cp $W/tests/pairs.py $D/tests/
sed -i 's/"cuda"/"cpu"/g; s/@pytest.mark.sanitize//; s/^REPEATS = 200/REPEATS = 2/' $D/tests/gpu/*.py
cat > $D/conftest.py <<'P'
import pytest, torch, sys, importlib.util, types
sys.path.insert(0, "/tmp/kda-emulator")
import check as emulated
from tfla_tk.backends.tk.kda import launch
TOL = {torch.bfloat16: 5e-3, torch.float16: 1.25e-3}
@pytest.fixture(params=list(TOL), ids=["bf16", "fp16"])
def dtype(request): return request.param
@pytest.fixture
def new_calls():
    launch._forwards = type(launch._forwards)(); yield; launch._forwards = type(launch._forwards)()
from tests.pairs import in_pairs
def pytest_collection_modifyitems(config, items): items[:] = in_pairs(items)
P
cd $D; PYTHONPATH=$W:$D timeout ${T:-560} $W/.venv/bin/python -m pytest -q -x --import-mode=importlib -p no:cacheprovider tests/gpu/test_kda.py "$@" 2>&1 | tail -${L:-25}
