"""RNN, GRU and LSTM against the equations, one sequence and one time step at a time."""

import math

import ml_dtypes
import numpy as np
import pytest


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


# The equations of the text, with its names.


def rnn_cell(x, state, w, r, wb, rb, p, f, options):
    return (f[0](w @ x + r @ state[0] + wb + rb),)


def gru_cell(x, state, w, r, wb, rb, p, f, options):
    (h,) = state
    (wz, wr, wh), (rz, rr, rh) = np.split(w, 3), np.split(r, 3)
    (wbz, wbr, wbh), (rbz, rbr, rbh) = np.split(wb, 3), np.split(rb, 3)
    z = f[0](wz @ x + rz @ h + wbz + rbz)
    reset = f[0](wr @ x + rr @ h + wbr + rbr)
    if options.get("linear_before_reset"):
        new = f[1](wh @ x + reset * (rh @ h + rbh) + wbh)
    else:
        new = f[1](wh @ x + rh @ (reset * h) + rbh + wbh)
    return ((1 - z) * new + z * h,)


def lstm_cell(x, state, w, r, wb, rb, p, f, options):
    h, c = state
    i, o, fo, g = np.split(w @ x + r @ h + wb + rb, 4)
    pi, po, pf = np.split(p, 3)
    i = f[0](i + pi * c)
    fo = 1 - i if options.get("input_forget") else f[0](fo + pf * c)
    c = fo * c + i * f[1](g)
    return f[0](o + po * c) * f[2](c), c


CELLS = {
    "RNN": (rnn_cell, 1, [np.tanh]),
    "GRU": (gru_cell, 3, [sigmoid, np.tanh]),
    "LSTM": (lstm_cell, 4, [sigmoid, np.tanh, np.tanh]),
}


def layer(op, x, w, r, b=None, lengths=None, h=None, c=None, p=None, functions=None, direction="forward", **options):
    cell, gates, default = CELLS[op]
    steps, batch, _ = x.shape
    ways = {"reverse": [True], "bidirectional": [False, True]}.get(direction, [False])
    n, d = r.shape[2], len(ways)
    functions = functions or [default] * d
    b = np.zeros((d, 2 * gates * n)) if b is None else b
    p = np.zeros((d, 3 * n)) if p is None else p
    zero = np.zeros((d, batch, n))
    first = [zero if h is None else h] + [zero if c is None else c] * (op == "LSTM")
    y, last = np.zeros((steps, d, batch, n)), [np.zeros((d, batch, n)) for _ in first]
    for k, backward in enumerate(ways):
        for j in range(batch):
            state = tuple(s[k, j] for s in first)
            length = steps if lengths is None else lengths[j]
            for t in range(length)[:: -1 if backward else 1]:
                state = cell(x[t, j], state, w[k], r[k], *np.split(b[k], 2), p[k], functions[k], options)
                y[t, k, j] = state[0]
            for s, value in zip(last, state, strict=True):
                s[k, j] = value
    return [y, *last]


def random(op, d, steps=4, batch=3, width=2, n=3, seed=0):
    rng = np.random.default_rng(seed)
    g = CELLS[op][1]
    shapes = {"x": (steps, batch, width), "w": (d, g * n, width), "r": (d, g * n, n), "b": (d, 2 * g * n), "h": (d, batch, n)}
    if op == "LSTM":
        shapes |= {"c": (d, batch, n), "p": (d, 3 * n)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def inputs(v, lengths=None):
    order = [v["x"], v["w"], v["r"], v.get("b"), lengths, v.get("h"), v.get("c"), v.get("p")]
    while order[-1] is None:
        order.pop()
    return order


VERSIONS = [("RNN", o) for o in (1, 7, 14, 22)] + [("GRU", o) for o in (1, 3, 7, 14, 22)] + [("LSTM", o) for o in (1, 7, 14, 22)]


@pytest.mark.parametrize(("op", "opset"), VERSIONS)
@pytest.mark.parametrize("direction", [None, "forward", "reverse", "bidirectional"])
def test_every_version(check, op, opset, direction):
    way = {"direction": direction} if direction else {}  # GRU-1's own default is misspelt
    v = random(op, 2 if direction == "bidirectional" else 1)
    more = {"output_sequence": 1} if opset < 7 else {}
    exact = {"opset": opset, "rtol": 1e-10, "atol": 1e-12}
    check(op, inputs(v), layer(op, **v, **way), hidden_size=3, **way, **more, **exact)
    bare = {k: v[k] for k in "xwr"}
    check(op, inputs(bare), layer(op, **bare, **way), **way, **exact)
    lengths = np.array([4, 1, 2], np.int32)
    check(op, inputs(v, lengths), layer(op, **v, lengths=lengths, **way), **way, **exact)
    single = {k: a.astype(np.float32) for k, a in v.items()}
    expected = [a.astype(np.float32) for a in layer(op, **v, **way)]
    check(op, inputs(single), expected, opset=opset, **way, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [14, 22])
@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_layout(check, op, opset):
    v = random(op, 2)
    lengths = np.array([0, 3, 4], np.int32)
    y, *last = layer(op, **v, lengths=lengths, direction="bidirectional")
    for name in "xhc":
        if name in v:
            v[name] = np.swapaxes(v[name], 0, 1)
    expected = [np.moveaxis(y, 2, 0), *(np.swapaxes(s, 0, 1) for s in last)]
    check(op, inputs(v, lengths), expected, opset=opset, layout=1, direction="bidirectional", rtol=1e-10)


ACTIVATIONS = {
    "Relu": lambda a, b: lambda v: np.maximum(v, 0),
    "Tanh": lambda a, b: np.tanh,
    "Sigmoid": lambda a, b: sigmoid,
    "Softsign": lambda a, b: lambda v: v / (1 + abs(v)),
    "Softplus": lambda a, b: lambda v: np.log(1 + np.exp(v)),
    "Affine": lambda a, b: lambda v: (1 if a is None else a) * v + (b or 0),
    "LeakyRelu": lambda a, b: lambda v: np.where(v >= 0, v, (0.01 if a is None else a) * v),
    "ThresholdedRelu": lambda a, b: lambda v: np.where(v >= (1 if a is None else a), v, 0),
    "ScaledTanh": lambda a, b: lambda v: (1 if a is None else a) * np.tanh((1 if b is None else b) * v),
    "HardSigmoid": lambda a, b: lambda v: np.clip((0.2 if a is None else a) * v + (0.5 if b is None else b), 0, 1),
    "Elu": lambda a, b: lambda v: np.where(v >= 0, v, (1 if a is None else a) * (np.exp(v) - 1)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(check, name):
    v = random("RNN", 2, steps=2)
    at = {"opset": 14, "direction": "bidirectional", "rtol": 1e-6, "atol": 1e-7}
    plain = [[ACTIVATIONS[name](None, None)], [np.tanh]]
    y = layer("RNN", **v, functions=plain, direction="bidirectional")
    check("RNN", inputs(v), y, activations=[name.lower(), "Tanh"], **at)
    given = [[ACTIVATIONS[name](0.75, 0.25)], [ACTIVATIONS[name](0.5, 0.125)]]
    y = layer("RNN", **v, functions=given, direction="bidirectional")
    check("RNN", inputs(v), y, activations=[name, name], activation_alpha=[0.75, 0.5], activation_beta=[0.25, 0.125], **at)


def test_parameters_are_consumed_in_order(check):
    v = random("LSTM", 1)
    f = [[sigmoid, ACTIVATIONS["LeakyRelu"](0.25, None), ACTIVATIONS["HardSigmoid"](0.5, 0.125)]]
    y = layer("LSTM", **v, functions=f)
    names = ["Sigmoid", "LeakyRelu", "HardSigmoid"]
    for alphas in ([0.25, 0.5], [9.0, 0.25, 0.5]):  # as many as take one, or as many as there are
        check("LSTM", inputs(v), y, opset=14, activations=names, activation_alpha=alphas, activation_beta=[0.125], rtol=1e-8)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
def test_clip(check, op):
    v = random(op, 1)

    def clipped(g):
        return lambda x: g(np.clip(x, -0.5, 0.5))

    f = [[clipped(g) for g in CELLS[op][2]]]
    check(op, inputs(v), layer(op, **v, functions=f), opset=7, clip=0.5, rtol=1e-10)


@pytest.mark.parametrize("opset", [3, 7, 14, 22])
def test_linear_before_reset(check, opset):
    v = random("GRU", 2)
    at = {"linear_before_reset": 1, "direction": "bidirectional"}
    check("GRU", inputs(v), layer("GRU", **v, **at), opset=opset, rtol=1e-10, **at)


@pytest.mark.parametrize("opset", [1, 7, 14, 22])
def test_input_forget(check, opset):
    v = random("LSTM", 1)
    check("LSTM", inputs(v), layer("LSTM", **v, input_forget=1), opset=opset, input_forget=1, rtol=1e-10)


def test_edges(check):
    v = random("GRU", 1, steps=2)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = {k: a.astype(dtype) for k, a in v.items()}
        wide = {k: a.astype(np.float64) for k, a in narrow.items()}
        check("GRU", inputs(narrow), [a.astype(dtype) for a in layer("GRU", **wide)], opset=22, atol=1e-2)
    v["x"] = v["x"][:0]  # no time at all: the state is the initial one
    check("GRU", inputs(v), [np.zeros((0, 1, 3, 3)), v["h"]], opset=14)
    v = random("RNN", 1, batch=0)
    check("RNN", inputs(v), [np.zeros((4, 1, 0, 3)), np.zeros((1, 0, 3))], opset=14)
    v = random("RNN", 1)
    v["x"][0, 0, 0] = math.nan  # stays within its sequence
    y = layer("RNN", **v)
    assert np.isnan(y[0][:, :, 0]).all() and not np.isnan(y[0][:, :, 1:]).any()
    check("RNN", inputs(v), y, opset=14)


def test_one_output(check):
    v = random("LSTM", 1)
    y = layer("LSTM", **v)
    check("LSTM", inputs(v), y[:1], opset=7)
    check("GRU", inputs(random("GRU", 1)), layer("GRU", **random("GRU", 1))[:1], opset=7)


def test_refusals(fails):
    v = random("LSTM", 1)
    fails("LSTM", inputs(v), "sideways", opset=14, direction="sideways")
    fails("LSTM", inputs(v), "W must have shape", opset=14, direction="bidirectional")
    fails("LSTM", inputs(v), "hidden_size must equal .* got 4", opset=14, hidden_size=4)
    fails("LSTM", inputs(v), "cosh", opset=14, activations=["cosh", "Tanh", "Tanh"])
    fails("LSTM", inputs(v), "activations must have 3 names, got 2", opset=14, activations=["Tanh", "Tanh"])
    fails("LSTM", inputs(v, np.array([5, 1, 1], np.int32)), "sequence_lens", opset=14)
    fails("LSTM", inputs(v, np.array([1, 1], np.int32)), "sequence_lens", opset=14)
    fails("LSTM", inputs(v), "layout must be 0 or 1, got 2", opset=14, layout=2)
    fails("LSTM", inputs({**v, "h": v["h"][:, :1]}), "initial_h", opset=14)
