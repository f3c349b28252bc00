"""The parts of a program that are the same for every model."""

from __future__ import annotations

from .stored import StoredArrays
from .text import quoted

_WEIGHTS = '''
class Weights:
    """The arrays of the file by their ONNX names; each becomes one tensor, even if it is read twice."""

    def __init__(self, path, dev):
        with np.load(path) as file:
            self.arrays = {name: READ for name in file.files}
        self.dev, self.tensors = dev, {}

    def param(self, name):
        return self._tensor(name, True)

    def state(self, name):
        return self._tensor(name, False)

    def _tensor(self, name, trains):
        if name not in self.tensors:
            array = self.arrays[name]
            made = tensor.Tensor(data=array, device=self.dev, requires_grad=trains, stores_grad=trains, name=name)
            self.tensors[name] = made
        return self.tensors[name]
'''

_STORED = '''
NARROW = {TABLE}
"""Arrays that are stored as bits, and their dtypes."""


def read(name, array):
    """Convert an array of the file to its original dtype."""
    if name in NARROW:
        return array.view(np.dtype(NARROW[name]))
    return array.astype(object) if array.dtype.kind == "U" else array
'''


def weights(stored: StoredArrays) -> str:
    """The class that reads the arrays, preceded by the function that converts bits and texts if there are any."""
    if not stored.narrow and not any(a.dtype.kind == "U" for a in stored.arrays.values()):
        return _WEIGHTS.replace("READ", "file[name]")
    table = "".join(f"    {quoted(k)}: {quoted(d)},\n" for k, d in stored.narrow.items())
    return _STORED.replace("TABLE", f"\n{table}" if table else "") + "\n" + _WEIGHTS.replace("READ", "read(name, file[name])")


_RANDOM = '''
def random_inputs(seed, sizes):
    """Random arrays for the inputs: floats are normal, integers and bools 0 or 1; open sizes are 1 by default.BESIDES"""
    generator = np.random.default_rng(seed)

    def drawn(kind, shape):
KINDS        shape = [d if isinstance(d, int) else sizes.get(d, 1) for d in shape]
        if kind == "object":
            return np.full(shape, "text", object)
        return (generator.standard_normal(shape) if "float" in kind else generator.integers(0, 2, shape)).astype(kind)

    arrays = {}
    for name, (kind, shape) in INPUTS.items():
        if shape is None:
            raise SystemExit(f"the shape of {name} is not known: pass the inputs with --inputs")
        arrays[name] = drawn(kind, shape)
    return arrays
'''

_KINDS = """        if kind.startswith("optional("):
            return None
        if kind.startswith("sequence("):
            return [drawn(kind[9:-1], shape) for _ in range(2)]
"""


_GIVEN = '''

def given_input(file, name, kind):
    """Read an input from a file: a sequence is stored as one array along its first axis; an optional may be absent."""
    if kind.startswith("optional("):
        return given_input(file, name, kind[9:-1]) if name in file else None
    if kind.startswith("sequence("):
        return list(file[name].astype(kind[9:-1]))
    return file[name].astype(kind)
'''


def inputs(plain: bool) -> str:
    """The functions that create the inputs of a model.  plain: whether all are tensors."""
    besides = "" if plain else "\n\n    A sequence has two arrays, an optional value is absent.\n    "
    return _RANDOM.replace("BESIDES", besides).replace("KINDS", "" if plain else _KINDS) + ("" if plain else _GIVEN)


def run(plain: bool) -> str:
    """The middle of `main`, after its options are parsed."""
    return _RUN.replace("READ_INPUT", "file[name].astype(kind)" if plain else "given_input(file, name, kind)")


COMPARE = '''
def compare(path, inputs, outputs):
    """Whether onnxruntime, in a child process, computes the same from the .onnx file, up to 1e-4 of the largest value."""
    try:
        with Oracle("onnxruntime") as oracle:
            expected = oracle.run(path, inputs, timeout=600)
    except MissingDependency as missing:
        print(f"not compared: {missing}")
        return True
    errors = {name: error(y, expected[name]) for name, y in outputs.items()}
    for name, apart in errors.items():
        print(f"{name}: differs from onnxruntime by {apart:.1e} of the largest value")
    return max(errors.values()) <= BOUND
'''

MAIN = '''
def main():
    """Run the model on seeded inputs, or on those of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="CPU", help="CPU, CUDA or CUDA:1")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="the .npz file of the weights")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="a size that the model leaves open")
    parser.add_argument("--inputs", type=Path, help="the inputs by name, in an .npz file")
    parser.add_argument("--output", type=Path, help="write the outputs by name to this .npz file")
    parser.add_argument("--onnx", type=Path, help="the model's .onnx file, to compare with onnxruntime")
'''

TRAIN_OPTION = """    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="then train on random targets")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
"""

_RUN = """    args = parser.parse_args()
    dev = device.resolve(args.device)
    net = Model(args.weights, dev)
    net.eval()
    sizes = {name: int(n) for name, _, n in (pair.partition("=") for pair in args.size)}
    if args.inputs:
        with np.load(args.inputs) as file:
            arrays = {name: READ_INPUT for name, (kind, _) in INPUTS.items()}
    else:
        arrays = random_inputs(args.seed, sizes)
    fed = [dev.backend.put(a) for a in arrays.values()]
    inputs = [a if a is None else tensor.Tensor(data=a, device=dev, requires_grad=False) for a in fed]
    made = net.forward(*inputs)
    ys = made if isinstance(made, tuple) else (made,)
    outputs = {name: y if y is None else dev.backend.get(y.data) for name, y in zip(OUTPUTS, ys, strict=True)}
    for name, y in outputs.items():
        print(f"{name}: {y.dtype}{list(y.shape)}\\n{y}" if isinstance(y, np.ndarray) else f"{name}: {y}")
    if args.output:
        write_npz(args.output, named_arrays(outputs))
    good = compare(args.onnx, arrays, outputs) if args.onnx else True
"""

TRAIN_RUN = """    if args.train:
        net.set_optimizer(opt.Adam(lr=args.lr))
        net.train()
        generator = np.random.default_rng(args.seed + 1)
        ts = [generator.standard_normal(outputs[name].shape).astype(outputs[name].dtype) for name in TRAINED]
        ts = [tensor.Tensor(data=t, device=dev, requires_grad=False) for t in ts]
        for step in range(args.train):
            _, loss = net(*inputs, *ts)
            print(f"step {step + 1}: loss {float(loss):.6g}")
"""

END = """    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
"""

HELPERS = {
    "batch_norm": '''

def batch_norm(x, scale, bias, mean, variance, epsilon):
    """Normalize by the statistics of the batch in training, otherwise by the given ones."""
    if not autograd.training:
        return op.BatchNormalization(x, scale, bias, mean, variance, epsilon=epsilon)
    return op.BatchNormalization(x, scale, bias, mean, variance, epsilon=epsilon, training_mode=1, outputs=3)[0]
''',
    "dropout": '''

def dropout(x, ratio, seed=None):
    """Return (y, mask): a share of the elements of y is zero in training; in inference y is x."""
    if autograd.training and seed is None:
        factor = autograd.Dropout(ratio=ratio)(op.full_like(x, 1))[0]  # 0, or 1 / (1 - ratio)
        return op.Mul(x, factor), op.Not(op.Equal(factor, 0.0))
    return op.Dropout(x, ratio, autograd.training, seed=seed, outputs=2)
''',
}
