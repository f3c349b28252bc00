"""Two examples of each command, shown at the end of its help; tests/cli/test_cli_help.py runs them."""

from __future__ import annotations

EXAMPLES = {
    "adapter": ("sonnx adapter task.safetensors", "sonnx adapter task.safetensors -o task.onnx_adapter"),
    "bisect": ("sonnx bisect model.onnx --to repro", "sonnx bisect model.onnx --data test_data_set_0 --against reference"),
    "check": ("sonnx check model.onnx", "sonnx check model.onnx --train"),
    "codegen": ("sonnx codegen model.onnx -o model.py", "sonnx codegen model.onnx -o model.py --force"),
    "compare": ("sonnx compare model.onnx --random 0 --size batch=2", "sonnx compare model.onnx --against older.onnx --all"),
    "completion": ("sonnx completion bash >> ~/.bashrc", "sonnx completion fish > ~/.config/fish/completions/sonnx.fish"),
    "conform": ("sonnx conform -k softmax", "sonnx conform -k '^test_relu' --results relu.json --junit relu.xml"),
    "convert": (
        "sonnx convert model.onnx -o older.onnx --opset 11",
        "sonnx convert model.onnx -o half.onnx --dtype float16 --keep-io-types",
    ),
    "device-check": (
        "sonnx device-check --to device-check",
        "sonnx device-check --stage smoke --stage suite --every 10",
    ),
    "diff": ("sonnx diff before.onnx after.onnx", "sonnx diff before.onnx after.onnx --html diff.html"),
    "doctor": ("sonnx doctor", "sonnx doctor --json"),
    "export": ("sonnx export net.py:build -o net.onnx --compare", "sonnx export net.py:Net -o net.onnx -i 'x=float32[2,3,8,8]'"),
    "extract": (
        "sonnx extract model.onnx --inputs a --outputs b -o part.onnx",
        "sonnx extract model.onnx --outputs b -o part.onnx",
    ),
    "foreign": ("sonnx foreign models --no-light", "sonnx foreign models -k relu --no-light --to reports"),
    "fuzz": ("sonnx fuzz --count 100 -k '^Softmax'", "sonnx fuzz --graphs 1 --only 7 --write repro"),
    "generate": (
        "sonnx generate gpt2 --prompt 'The sea is' --max-new-tokens 20",
        "sonnx generate gpt2 --prompt 'The sea is' --temperature 0.8 --seed 1",
    ),
    "gradients": ("sonnx gradients '^Softmax-13$'", "sonnx gradients '^Relu' --points 5"),
    "guard": (
        "sonnx guard write model.onnx -o model.guard",
        "sonnx guard check model.guard --against onnxruntime --junit guard.xml",
    ),
    "inspect": ("sonnx inspect model.onnx --stats", "sonnx inspect model.onnx --html - > graph.html"),
    "layout": (
        "sonnx layout model.onnx --to channels_last -o last.onnx",
        "sonnx layout model.onnx --to channels_first -o o.onnx",
    ),
    "merge": (
        "sonnx merge model.onnx task.safetensors -o merged.onnx",
        "sonnx merge model.onnx task.safetensors -o two.onnx --form inputs",
    ),
    "opsets": ("sonnx opsets '^Mish$'", "sonnx opsets '^Celu$' --oracle none"),
    "optimize": ("sonnx optimize model.onnx -o small.onnx", "sonnx optimize --list"),
    "profile": (
        "sonnx profile model.onnx --trace run.json --html times.html",
        "sonnx profile model.onnx --train --inputs digits.npz",
    ),
    "quantize": (
        "sonnx quantize model.onnx --data samples.npz -o int8.onnx",
        "sonnx quantize model.onnx --weight-only int4 -o int4.onnx",
    ),
    "reduce": (
        "sonnx reduce broken.onnx --raises SX404",
        "sonnx reduce broken.onnx --raises SX404 --to small --tries 50",
    ),
    "report": ("sonnx report cpu.json --to reports", "sonnx report cpu.json --to reports --check"),
    "run": ("sonnx run model.onnx --random 0 --size batch=2", "sonnx run model.onnx -i x=x.npy -o y.npz"),
    "lower": ("sonnx lower model.onnx -o standard.onnx", "sonnx lower model.onnx -o standard.onnx --opset 23"),
    "sanitize": ("sonnx sanitize model.onnx -o clean.onnx", "sonnx sanitize model.onnx -o clean.onnx --json"),
    "sweep": (
        "sonnx sweep models --task compare --results swept",
        "sonnx sweep models --task check --junit sweep.xml",
    ),
    "tolerances": ("sonnx tolerances", "sonnx tolerances LayerNormalization"),
    "train": (
        "sonnx train model.onnx --data digits.npz -o tuned.onnx --checkpoint run.ckpt",
        "sonnx train model.onnx --data digits.npz --checkpoint run.ckpt --resume",
    ),
}
