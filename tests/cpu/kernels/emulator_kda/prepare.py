"""Copies the kernel sources that KDA includes to src/, with asm statements as calls of the emulator."""
import re, sys, pathlib
KERNELS = pathlib.Path(sys.argv[1]); OUT = pathlib.Path(__file__).parent / "src"
STAND_INS = {"common/launch.cuh", "common/kernel.cuh", "kittens.cuh", "common/loaded_kernel.h"}

def balanced(text, i):
    """Index behind the parenthesis that opens at i."""
    depth, j = 0, i
    while True:
        c = text[j]
        if c == '"':
            j += 1
            while text[j] != '"': j += 2 if text[j] == "\\" else 1
        elif c in "([{": depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0: return j + 1
        j += 1

def split(text, separator):
    parts, depth, j, start = [], 0, 0, 0
    while j < len(text):
        c = text[j]
        if c == '"':
            j += 1
            while text[j] != '"': j += 2 if text[j] == "\\" else 1
        elif c in "([{": depth += 1
        elif c in ")]}": depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:j]); start = j + 1
        j += 1
    return [*parts, text[start:]]

templates = set()
def convert(body):
    sections = split(body, ":")
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0]))
    operands = []
    for n, section in enumerate(sections[1:3]):
        for part in split(section, ","):
            if m := re.match(r'\s*(?:\[\w+\]\s*)?"([^"]+)"\s*\((.*)\)\s*$', part, re.S):
                operands.append(f'emulator::{"output" if n == 0 else "input"}("{m[1]}", {m[2]})')
    if template == "" : kind = "run_empty"
    else: kind = "run_asm"; templates.add(template)
    return f'emulator::{kind}("{template}", {{{", ".join(operands)}}})'

def transform(text):
    out, i = [], 0
    for m in re.finditer(r'\basm\b(\s+volatile)?\s*\(', text):
        if m.start() < i: continue
        line = text.rfind("\n", 0, m.start())
        before = text[text.rfind("\n", 0, line) + 1 : line]
        own = text[line + 1 : m.start()]
        if before.endswith("\\") or own.lstrip().startswith("//"): continue
        end = balanced(text, m.end() - 1)
        out.append(text[i : m.start()]); out.append(convert(text[m.end() : end - 1])); i = end
    out.append(text[i:])
    text = "".join(out)
    text = text.replace("extern __shared__ __align__(1024) unsigned char shared_memory[];", "unsigned char* const shared_memory = emulator::arena();")
    return text

done = set()
def copy(name):
    if name in done or name in STAND_INS: return
    done.add(name)
    text = (KERNELS / name).read_text()
    to = OUT / name; to.parent.mkdir(parents=True, exist_ok=True); to.write_text(transform(text))
    for found in re.findall(r'#include "([^"]+)"', text):
        if (KERNELS / found).exists(): copy(found)
for root in ("kda/launcher.cu", "kda/bindings/launcher.cpp"): copy(root)
print(len(done)); print("\n".join(sorted(templates)))
