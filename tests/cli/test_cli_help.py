"""The help of the command line: sections, examples that run, completion and versions."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper, parser
from tests.helpers.language_models import Decoder, write

from singa.cli._examples import EXAMPLES
from singa.cli._main import COMMANDS, SECTIONS, main
from singa_backend import SingaBackend
from singa_backend.adapters import Adapter, LowRank
from singa_backend.conform import cases, gaps, results, worker
from singa_backend.devices.device import device_count


def test_help_has_each_command_in_one_section() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    lines = CliRunner().invoke(main, ["--help"], terminal_width=80).output.splitlines()
    column = next(line.index(" run ") for line in lines if line.startswith("  Use ")) + 1
    found: dict[str, list[str]] = {}
    for line in lines[next(i for i, line in enumerate(lines) if line.startswith("  Use ")) :]:
        if line[column - 1 : column] != " " or not line[column : column + 1].strip():
            break
        title = line[:column].strip() or title  # noqa: F821
        found.setdefault(title, []).append(line[column:].split()[0])
    assert found == {title: list(names) for title, names in SECTIONS.items()}


PROGRAM = """
from singa import layer, model, tensor

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.dense = layer.Flatten(), layer.Linear(4)

    def forward(self, x):
        return self.dense(self.flat(x))

def build():
    return Net(), [tensor.random((2, 3, 8, 8))]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples read."""
    folder = tmp_path_factory.mktemp("examples")
    head, random = '<ir_version: 8, opset_import: ["": 17]>', np.random.default_rng(0)
    body = "a = Conv (x, c) b = Relu (a) p = GlobalAveragePool (b) f = Flatten (p) y = MatMul (f, w)"
    made = parser.parse_model(f"{head} g (float[batch,3,8,8] x) => (float[batch,4] y) {{ {body} }}")
    weights = {"c": (4, 3, 3, 3), "w": (4, 4)}
    made.graph.initializer.extend(
        numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n) for n, s in weights.items()
    )
    (folder / "models").mkdir()
    for name in ("model", "older", "before"):
        onnx.save(made, folder / f"{name}.onnx")
    relu = f"{head} g (float[2,3] x) => (float[2,3] y) {{ y = Relu (x) }}"
    onnx.save(parser.parse_model(relu), folder / "models" / "relu-script-17.onnx")
    np.savez(folder / "models" / "relu.npz", x0_0=np.ones((2, 3), np.float32), y0_0=np.ones((2, 3), np.float32))
    made.graph.node[-1].op_type = "Add"
    made.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    onnx.save(made, folder / "after.onnx")
    wrong = "h = Relu (x) s = Add (h, h) k = Constant <value_ints = [7, 5]> () y = Reshape (s, k)"
    onnx.save(parser.parse_model(f"{head} g (float[2,3] x) => (float[m,n] y) {{ {wrong} }}"), folder / "broken.onnx")
    x = random.standard_normal((40, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "digits.npz", x=x, y=random.integers(0, 4, 40))
    np.savez(folder / "samples.npz", x=x)
    np.save(folder / "x.npy", x[:2])
    factors = (random.standard_normal(s).astype(np.float32) for s in ((2, 4), (4, 2)))
    Adapter({"w": LowRank(*factors, 0.5)}, {}, "", {}).save(folder / "task.safetensors")
    run_model, data = SingaBackend.prepare(folder / "model.onnx"), folder / "test_data_set_0"
    data.mkdir()
    for kind, value in (("input", x[:2]), ("output", run_model.run([x[:2]])[0])):
        (data / f"{kind}_0.pb").write_bytes(numpy_helper.from_array(value).SerializeToString())
    (folder / "net.py").write_text(PROGRAM)
    write(folder / "gpt2", {"model": Decoder().model()})
    one = worker.run(cases.load(["node"], "^test_relu$"), processes=1)
    results.save(results.to_json(one, gaps.judge(one, {}), worker.OURS, "CPU", "0" * 16), folder / "cpu.json")
    return folder


CODES = {"diff": 1}
"""The exit codes of examples other than 0: the models differ."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_two_examples_that_run(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = CliRunner().invoke(main, [name, "--help"]).output
    examples = EXAMPLES[name]
    assert len(examples) == len(set(examples)) == 2
    for line in examples:
        assert f"  {line}\n" in text and len(line) <= 78
        assert shlex.split(line)[:2] == ["sonnx", name]
    if name == "device-check" and device_count("CUDA"):
        pytest.skip("on a device, this takes minutes")
    code = 1 if name == "device-check" else CODES.get(name, 0)
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files))
    for line in examples:
        arguments = shlex.split(re.sub(r" >>? \S+$", "", line))[1:]  # what a shell writes to a file is the output
        done = CliRunner().invoke(main, arguments)  # in this process, which saves the start of 66
        assert done.exit_code == code, (line, done.stdout, done.stderr, done.exception)
        assert done.stdout or capfd.readouterr().out


def test_help_fits_a_screen() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 80
    assert all(re.search(rf"^ {{2}}.* {name}  +{re.escape(line)}$", text, re.MULTILINE) for name, (_, line) in COMMANDS.items())


def completed(words: str, current: int) -> list[str]:
    settings = {"_SONNX_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(current)}
    code = "from singa.cli import main; main(prog_name='sonnx')"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["completion", shell])
    assert found.exit_code == 0 and f"_SONNX_COMPLETE={shell}_complete" in found.output
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(found.output)
        subprocess.run([shell, "-n", str(path)], check=True)


def test_completion_completes_commands_and_options() -> None:
    assert completed("sonnx co", 1) == [f"plain,{n}" for n in ("codegen", "compare", "completion", "conform", "convert")]
    assert completed("sonnx run --val", 2) == ["plain,--validate"]


def test_version_names_the_libraries_and_loads_none() -> None:
    code = (
        "import sys\nfrom singa.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
        "assert not {'numpy', 'onnx', 'rich', 'cupy', 'singa_backend'} & set(sys.modules)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["sonnx", "onnx", "NumPy", "oneDNN", "CuPy", "Python"]
    assert f"onnx {version('onnx')}" in lines and f"NumPy {version('numpy')}" in lines
    found = json.loads(CliRunner().invoke(main, ["--version", "--json"]).output)
    assert found["schema"] == "sonnx.version" and found["versions"]["onnx"] == version("onnx")


def test_no_help_loads_the_libraries() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom singa.cli._main import COMMANDS, main\n"
        "for name in COMMANDS: print(name, CliRunner().invoke(main, [name, '--help']).exit_code)\n"
        "import singa_backend, singa\nassert not {'numpy', 'onnx', 'cupy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.splitlines()) == ("", [f"{name} 0" for name in COMMANDS])


def test_onednn_of_a_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_ONEDNN", "off")
    assert "oneDNN SONNX_ONEDNN=off" in CliRunner().invoke(main, ["--version"]).output


@pytest.mark.parametrize("args", [[], ["--json", "run"], ["--nothing"]])
def test_usage_of_the_group(args: list[str]) -> None:
    found = CliRunner().invoke(main, args)
    assert found.exit_code in (0, 2) and "Usage: " in found.output + found.stderr
