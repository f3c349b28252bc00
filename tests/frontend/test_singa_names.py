"""The names of SINGA that its tests and programs use in addition to the documented ones; `creator.backward` of every operator."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers.paths import PROJECT

import singa
from singa import autograd, device, image_tool, layer, model, opt, singa_wrap, sonnx, tensor, utils
from singa.autograd import Formula
from singa.tensor import Tensor
from singa_backend.errors import DeviceUnavailable, InvalidInput, InvalidModel, NoGradientWarning, UnsupportedModel


@pytest.fixture(autouse=True)
def training():
    autograd.training = True
    yield
    autograd.training = False


def T(values, **kwargs):
    return Tensor(data=np.asarray(values, np.float32), **kwargs)


def drawn(*shape, seed=0, low=0.1, high=0.9):
    return Tensor(data=np.random.default_rng(seed).uniform(low, high, shape), stores_grad=True)


# --- creator.backward of every function of autograd ----------------------------------------------------------------------

A, B, IMAGE = (2, 3), (2, 3), (2, 3, 6, 6)
LABELS = Tensor(data=np.array([[0.2, 0.3, 0.5], [1, 0, 0]]), requires_grad=False)
POOL = autograd.PoolingHandle((2, 2), (2, 2))

CASES = {
    "Acosh": ([(2, 3, "high")], {}),
    "Matmul": ([(2, 3), (3, 4)], {}),
    "Gemm": ([(2, 3), (3, 4), (4,)], {"alpha": 0.5}),
    "AddBias": ([(2, 3), (3,)], {}),
    "BiasAdd": ([(2, 3), (3,)], {}),
    "Reshape": ([A], {"shape": [3, 2]}),
    "Squeeze": ([(2, 1, 3)], {"axis": 1}),
    "Unsqueeze": ([A], {"axis": [0]}),
    "Split": ([A], {"axis": 1, "parts": [1, 2]}),
    "Slice": ([A], {"starts": [0], "ends": [2], "axes": [1]}),
    "Tile": ([A], {"repeats": [2, 2]}),
    "Expand": ([(1, 3)], {"shape": [2, 3]}),
    "Pad": ([A], {"pads": [1, 0, 0, 1]}),
    "UpSample": ([(1, 1, 2, 2)], {"mode": "nearest", "scales": [1.0, 1.0, 2.0, 2.0]}),
    "DepthToSpace": ([(1, 4, 2, 2)], {"blocksize": 2}),
    "SpaceToDepth": ([(1, 1, 4, 4)], {"blocksize": 2}),
    "Gather": ([A], {"axis": 1, "indices": [0, 2]}),
    "ScatterElements": ([A, np.array([[0, 1, 1]]), (1, 3)], {}),
    "Where": ([A, B], {"condition": np.array([[True, False, True]])}),
    "OneHot": ([np.array([0, 1])], {"axis": -1, "depth": 3}),
    "Embedding": ([np.array([0, 1, 1]), (3, 4)], {}),
    "Cast": ([A], {"to": tensor.float32}),
    "ConstantOfShape": ([np.array([2, 3])], {}),
    "GlobalAveragePool": ([IMAGE], {}),
    "SoftMaxCrossEntropy": ([A], {"t": LABELS}),
    "NextTokenCrossEntropy": ([(1, 2, 3)], {"t": Tensor(data=np.array([[1, 0]]), requires_grad=False)}),
    "MeanSquareError": ([A], {"t": LABELS}),
    "CrossEntropy": ([A], {"t": LABELS}),
    "BinaryCrossEntropy": ([A], {"t": LABELS}),
    "Narrow": ([A], {"axis": 1, "start": 0, "length": 2}),
    "AdaptiveAvgPool": ([IMAGE], {"output_size": 4}),
    "AdaptiveMaxPool": ([IMAGE], {"output_size": 4}),
    "FusedSelfAttention": ([(4, 2, 12)], {"head_size": 2}),
    "_Conv2d": ([IMAGE, (4, 3, 3, 3), (4,)], {"handle": autograd.ConvHandle(), "odd_padding": (1, 0, 0, 0)}),
    "_Pooling2d": ([IMAGE], {"handle": POOL}),
    "_BatchNorm2d": (
        [IMAGE, (3,), (3,)],
        {"handle": autograd.BatchNormHandle(), "running_mean": T(np.zeros(3)), "running_var": T(np.ones(3))},
    ),
}
"""The shapes (or values) of the tensors and the options of the functions that do not take tensors of shape A."""

FORMULAS = sorted(
    {c.__name__: c for c in vars(autograd).values() if inspect.isclass(c) and issubclass(c, Formula) and c is not Formula}.items()
)


def arguments(made):
    """Tensors that store their gradients, and options, for a class."""
    if made.__name__ in CASES:
        shapes, options = CASES[made.__name__]
    else:
        parameters = list(inspect.signature(made._formula).parameters.values())[1:]
        tensors = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        variadic = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        shapes, options = [A] * (3 if variadic else len(tensors)), {}
    xs = []
    for i, shape in enumerate(shapes):
        if isinstance(shape, np.ndarray):
            xs.append(Tensor(data=shape, requires_grad=False))
        elif shape[-1] == "high":
            xs.append(drawn(*shape[:-1], seed=i, low=1.5, high=2.5))
        else:
            xs.append(drawn(*shape, seed=i))
    return xs, options


@pytest.mark.parametrize(("name", "made"), FORMULAS)
def test_creator_backward_is_the_gradient_of_the_function(name, made):
    xs, options = arguments(made)
    ys = made(**options)(*xs)
    flows = [y for y in ys if y.requires_grad]
    if not flows:
        with pytest.raises(InvalidInput) as refused:
            ys[0].creator.backward(1.0)
        assert refused.value.code == "SX313"
        return
    dys = [np.random.default_rng(9).standard_normal(y.shape).astype(y.data.dtype) for y in ys]
    found = ys[0].creator.backward(*dys)
    again = ys[0].creator.backward(*(tensor.from_numpy(d) for d in dys))
    loss = None
    for y, d in zip(ys, dys, strict=True):
        part = autograd.cast(tensor.sum(autograd.mul(y, tensor.from_numpy(d))), np.float64)
        loss = part if loss is None else autograd.add(loss, part)
    wanted = autograd.gradients(loss)
    got = found if isinstance(found, tuple) else (found,)
    assert len(xs) >= len(got)
    for x, g, h in zip(xs, got, again if isinstance(again, tuple) else (again,), strict=False):
        if id(x) in wanted:
            np.testing.assert_allclose(g, wanted[id(x)].data, rtol=1e-6, atol=1e-12, err_msg=name)
            np.testing.assert_array_equal(g, h)
        else:
            assert g is None
    assert all(id(x) not in wanted for x in xs[len(got) :])


def test_the_table_reaches_every_function():
    assert len(FORMULAS) > 90 and set(CASES) <= {name for name, _ in FORMULAS}


def test_creator_backward_of_layers():
    x = T(np.random.default_rng(0).standard_normal((2, 3, 3, 3)))
    shapes = [g.shape for g in layer.Conv2d(3, 1, 2)(x).creator.backward(np.ones((2, 1, 2, 2), np.float32))]
    assert shapes == [(2, 3, 3, 3), (1, 3, 2, 2), (1,)]
    assert len(layer.Conv2d(3, 1, 2, bias=False)(x).creator.backward(1.0)) == 2
    assert [g.shape for g in layer.BatchNorm2d(3)(x).creator.backward(x.data)] == [(2, 3, 3, 3), (3,), (3,)]
    assert layer.MaxPool2d(2)(x).creator.backward(1.0).shape == x.shape


def test_creator_backward_of_a_loss_needs_no_gradient():
    x, t = T([[1, 2]]), T([[0, 4]])
    np.testing.assert_allclose(autograd.mse_loss(x, t).creator.backward(), [[1, -2]])
    np.testing.assert_allclose(autograd.mse_loss(x, t).creator.backward(3.0), [[3, -6]])


def test_creator_backward_on_another_device():
    x = Tensor(data=np.array([[1, 2]], np.float32), device="STRICT")
    for y in (autograd.softmax(x), autograd.exp(x)):
        for dy in (np.ones((1, 2)), 1.0, Tensor(data=np.ones((1, 2)), device="STRICT")):
            assert type(y.creator.backward(dy)) is type(x.data)
    with pytest.raises(InvalidInput) as refused:
        autograd.exp(x).creator.backward(T([[1, 2]]))
    assert refused.value.code == "SX344"


def test_a_step_that_calls_creator_backward_stays_on_the_tape():
    class Net(Flat):
        def train_one_batch(self, x):
            loss = autograd.reduce_mean(autograd.square(self.forward(x)), keepdims=0)
            self.dx = loss.creator.backward(1.0)
            self.optimizer(loss)
            return loss

    net, x = Net(None), T(np.ones((2, 4)), requires_grad=False)
    net.compile([x], is_train=True, use_graph=True)
    with pytest.warns(UserWarning, match="stay on the tape"):
        net(x)
        net(x)
    assert net.dx.shape == (2, 3) and "cannot become part of a graph" in str(net.not_traceable)


def test_equal_inputs_have_a_gradient_each():
    x = T([2, 3])
    a, b = autograd.mul(x, x).creator.backward(1.0)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, [2, 3])


def test_constants_have_gradients_too():
    x, c = T([2, 3]), T([5, 7], requires_grad=False)
    dx, dc = autograd.mul(x, c).creator.backward(1.0)
    assert dx.tolist() == [5, 7] and dc.tolist() == [2, 3]


def test_an_inner_history_is_not_followed():
    """The gradient ends at the tensors of the function, also if an option was computed from one of them."""
    x = T([[1, 2]])
    t = autograd.mul(x, x)
    np.testing.assert_allclose(autograd.mse_loss(x, t).creator.backward(), [[0, -2]])


def test_creator_backward_refuses():
    x = T([1, 2])
    y = autograd.softmax(T([[1, 2]]))
    with pytest.raises(InvalidInput, match=r"must have its shape \(1, 2\), got \(3,\)") as refused:
        y.creator.backward(np.ones(3, np.float32))
    assert refused.value.code == "SX373"
    with pytest.raises(InvalidInput, match="got 2"):
        y.creator.backward(1.0, 1.0)
    with pytest.raises(InvalidInput, match="leaf"):
        x.creator.backward(1.0)
    parts = autograd.fused_self_attention_query_mul_key_and_value(drawn(4, 2, 12), 2)
    last = parts[1].creator
    del parts
    with pytest.raises(InvalidInput, match="no longer exists"):
        last.backward(1.0)


def test_creator_backward_keeps_no_tape_alive():
    import gc
    import weakref

    gc.disable()
    try:
        y = autograd.softmax(T([[1, 2]]))
        node = weakref.ref(y.creator)
        del y
        assert node() is None
    finally:
        gc.enable()


def test_recurrent_operator():
    rng = np.random.default_rng(0)
    made = layer.CudnnRNN(4, rnn_mode="gru", batch_first=False)
    x, h = T(rng.standard_normal((5, 2, 3))), T(np.zeros((1, 2, 4)))
    want = made(x, h)
    y = autograd._RNN(autograd.RNNHandle(4, "gru"))(x, h, None, made.W)[0]
    np.testing.assert_array_equal(y.data, want.data)
    dx, dh, dc, dW = y.creator.backward(np.ones(y.shape, np.float32))
    assert (dx.shape, dh.shape, dc, dW.shape) == (x.shape, h.shape, None, made.W.shape)
    made.W.stores_grad = True
    np.testing.assert_allclose(dW, autograd.gradients(tensor.sum(want))[id(made.W)].data, rtol=1e-5, atol=1e-6)


# --- a gradient of zero --------------------------------------------------------------------------------------------------


class Flat(model.Model):
    def __init__(self, cut, mixed=False):
        super().__init__()
        self.body, self.head, self.cut, self.mixed = layer.Linear(3), layer.Linear(2), cut, mixed
        self.optimizer = opt.SGD(lr=0.1, momentum=0.9)

    def forward(self, x):
        return self.body(x)

    def train_one_batch(self, x):
        y = self.cut(self.forward(x))
        loss = tensor.sum(autograd.square(self.head(y) if self.mixed else y))
        self.optimizer(loss)
        return loss


FLAT = [autograd.sign, autograd.ceil, autograd.floor, autograd.round, autograd.rounde]


@pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
@pytest.mark.parametrize("cut", FLAT, ids=lambda f: f.__name__)
def test_a_loss_through_a_step_function_has_gradients_of_zero(cut, graph):
    net, x = Flat(cut), T(np.ones((2, 4)), requires_grad=False)
    net.compile([x], is_train=True, use_graph=graph)
    before = {n: tensor.to_numpy(p).copy() for n, p in net.get_params().items() if n.startswith("body")}
    with pytest.warns() as seen:
        net(x)
        net(x)
    assert {type(w.message) for w in seen} == {NoGradientWarning}  # the step was recorded in graph mode
    assert "the gradients of all parameters are zero" in str(seen[0].message)
    for name, value in before.items():
        np.testing.assert_array_equal(tensor.to_numpy(net.get_params()[name]), value)
    assert float(net.optimizer.step_counter) == 2 and not net.not_traceable


@pytest.mark.parametrize("graph", [False, True], ids=["tape", "graph"])
def test_a_mixed_loss_names_what_gets_no_gradient(graph):
    net, x = Flat(autograd.floor, mixed=True), T(np.ones((2, 4)), requires_grad=False)
    net.compile([x], is_train=True, use_graph=graph)
    with pytest.warns(NoGradientWarning, match="no gradient reaches") as seen:
        net(x)
    assert set(seen[0].message.parameters) == {"body.W", "body.b"}


def test_inputs_that_require_gradients_do_not_hide_it():
    p, x = T([1.5, -2.5], stores_grad=True), T([1, 1])
    with pytest.warns(NoGradientWarning):
        grads = autograd.gradients(tensor.sum(autograd.mul(autograd.floor(p), x)))
    assert grads[id(p)].data.tolist() == [0, 0]


BLOCKS = [lambda p: autograd.greater(autograd.floor(p), p), lambda p: autograd.cast(p, np.int32), autograd.nonzero]


@pytest.mark.parametrize("block", BLOCKS)
def test_other_operators_without_gradient_are_refused(block):
    p = T([1.5, -2.5], stores_grad=True)
    with pytest.raises(InvalidInput) as refused:
        list(autograd.backward(tensor.sum(autograd.cast(block(p), np.float32))))
    assert refused.value.code == "SX345"


def test_a_loss_of_several_elements_is_refused_first():
    p = T([1.5, -2.5], stores_grad=True)
    with pytest.raises(InvalidInput) as refused:
        list(autograd.backward(autograd.floor(p)))
    assert refused.value.code == "SX314"


def file_with(*ops):
    """A file: Mul by a weight w, then operators of one input."""
    names = ["h", *(f"v{i}" for i in range(len(ops)))]
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"])]
    nodes += [helper.make_node(o, [a], [b]) for o, a, b in zip(ops, names, names[1:], strict=False)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.array([1.5, -2.5], np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("inside", [True, False])
def test_the_operator_may_be_in_a_file(inside):
    net = sonnx.SONNXModel(file_with("Floor", "Neg") if inside else file_with("Neg"))
    net.train()
    y = net.forward(T([1, 1], requires_grad=False))[0]
    y = y if inside else autograd.floor(y)
    with pytest.warns(NoGradientWarning):
        found = [(p.name, g.data.tolist()) for p, g in autograd.backward(tensor.sum(y))]
    assert found == [("w", [0, 0])]


# --- names ---------------------------------------------------------------------------------------------------------------


def test_versions_and_build_options():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert singa.__version__ == singa_wrap.__version__ == project["version"]
    assert singa_wrap.USE_CUDA is (device.get_num_gpus() > 0) and isinstance(singa_wrap.USE_DIST, bool)
    with pytest.raises(AttributeError, match="CTensor"):
        singa_wrap.CTensor  # noqa: B018


def test_the_wrapper_is_light():
    code = "import singa.singa_wrap, sys; print([m for m in sys.modules if m in ('onnx', 'cupy', 'singa.autograd')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "singa.autograd" not in done.stdout and "cupy" not in done.stdout


def test_devices_of_sonnx():
    assert sonnx.cpu_dev is device.get_default_device()
    assert (sonnx.gpu_dev is None) is (device.get_num_gpus() == 0)


def test_raw_tensors_share_storage():
    array = np.arange(3, dtype=np.int64)
    t = tensor.from_raw_tensor(array)
    array[0] = 7
    assert t.data.tolist() == [7, 1, 2] and t.data.dtype == np.int64
    assert [x.shape for x in tensor.from_raw_tensors((np.ones(2), np.ones((1, 1))))] == [(2,), (1, 1)]


@pytest.mark.parametrize("x", [T([1, 2]), np.array([1.0, 2.0], np.float16)])
def test_ctensor2numpy_copies(x):
    made = autograd.ctensor2numpy(x)
    raw = x.data if isinstance(x, Tensor) else x
    assert type(made) is np.ndarray and made.dtype == raw.dtype and not np.shares_memory(made, raw)


def test_device_check_moves_to_the_device_of_the_first():
    x, y = T([1]), Tensor(data=np.ones(2), device="STRICT")
    opt.SGD().device_check(x, y)
    assert y.device is x.device and y.data.dtype == np.float64


@pytest.mark.parametrize("code", [c for c in TensorProto.DataType.values() if c])
def test_no_dtype_is_narrowed(code):
    want = helper.tensor_dtype_to_np_dtype(code)
    made = sonnx.onnx_type_to_singa_type(code)
    assert made == want or (code == TensorProto.STRING and made.kind == "O")


def test_an_unknown_element_type_is_refused():
    with pytest.raises(InvalidInput, match="element type"):
        sonnx.onnx_type_to_singa_type(99)


def test_onnx_node_reads_a_proto_as_the_backend_does():
    proto = helper.make_node("LeakyRelu", ["x"], ["y"], name="n", alpha=0.25)
    node = sonnx.OnnxNode(proto)
    assert (node.name, node.op_type, node.inputs, node.outputs) == ("n", "LeakyRelu", ["x"], ["y"])
    assert node.attrs == sonnx.OnnxAttributes.from_onnx(proto.attribute) == {"alpha": 0.25}
    assert isinstance(node.attrs, sonnx.OnnxAttributes) and node.getattr("beta", 7) == 7
    graph = helper.make_graph(
        [proto],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    prepared = sonnx.prepare(helper.make_model(graph)).layers[0].node
    assert vars(prepared).keys() == vars(node).keys() and prepared.attrs == node.attrs
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.arange(3)))
    assert sonnx.OnnxNode(constant).getattr("value").tolist() == [0, 1, 2]
    assert sonnx.OnnxNode(helper.make_node("Conv", "xw", "y", auto_pad="VALID")).getattr("auto_pad") == "VALID"


@pytest.mark.parametrize("wrap", [lambda n: n, sonnx.OnnxNode], ids=["proto", "OnnxNode"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_get_op_computes_and_records(wrap, dtype):
    node = helper.make_node("Gemm", ["a", "b"], ["y"], transB=1)
    a, b = Tensor(data=np.ones((2, 3), dtype)), Tensor(data=np.ones((4, 3), dtype), stores_grad=True)
    made = sonnx.get_op(wrap(node))(a, b)
    assert isinstance(made, tuple) and made[0].data.dtype == dtype
    np.testing.assert_array_equal(made[0].data, np.full((2, 4), 3))
    assert autograd.gradients(tensor.sum(made[0]))[id(b)].data.tolist() == np.full((4, 3), 2.0).tolist()
    assert [g.shape for g in made[0].creator.backward(1.0)] == [(2, 3), (4, 3)]


def test_get_op_of_other_nodes():
    split = helper.make_node("Split", ["x"], ["a", "b"], axis=0, split=[1, 2])
    assert [y.shape for y in sonnx.get_op(split)(T([1, 2, 3]))] == [(1,), (2,)]
    clip = helper.make_node("Clip", ["x", "", "high"], ["y"])
    for xs in ((T([1, 9]), T(5)), (T([1, 9]), None, T(5))):
        assert sonnx.get_op(clip)(*xs)[0].data.tolist() == [1, 5]
    same = helper.make_node("Mul", ["x", "x"], ["y"])
    assert sonnx.get_op(same)(T([3]), T([3]))[0].data.tolist() == [9]
    ids = sonnx.get_op(helper.make_node("Shape", ["x"], ["y"]))(T([[1, 2]]))[0]
    assert ids.data.dtype == np.int64
    last = helper.make_node("ReduceSum", ["x"], ["y"], axes=[0], keepdims=0)
    assert sonnx.get_op(last)(T([1, 2]))[0].data == 3
    with pytest.raises(InvalidModel):
        sonnx.get_op(last, 13)
    assert sonnx.SingaBackend._opset_version == 11


def test_nodes_of_a_prepared_model_become_operators():
    rep = sonnx.prepare(file_with("Elu", "Relu"))
    values = {"x": T([1, 2]), "w": T([1.5, -2.5])}
    for node, _ in rep.layers:
        values[node.outputs[0]] = sonnx.get_op(node, 17)(*(values[n] for n in node.inputs))[0]
    np.testing.assert_array_equal(values["v1"].data, rep.run([np.array([1, 2], np.float32)])[0])
    assert sonnx.run_node(rep.layers[1].node, [T([-1])])[0].data == pytest.approx(np.expm1(-1))


def test_run_node_takes_tensors_by_name():
    node = sonnx.OnnxNode(helper.make_node("Sub", ["a", "b"], ["y"]))
    made = sonnx.run_node(node, {"b": T([1, 2]), "a": T([5, 5])})
    assert made["y"].data.tolist() == made[0].data.tolist() == [4, 3]
    assert sonnx.run_node(node, {"b": np.float32([1]), "a": np.float32([5])})[0].tolist() == [4]


def test_get_op_refuses():
    with pytest.raises(InvalidInput, match="NodeProto or an OnnxNode"):
        sonnx.get_op("Relu")
    relu = sonnx.get_op(helper.make_node("Relu", ["x"], ["y"]))
    with pytest.raises(InvalidInput, match="takes 1 inputs"):
        relu(T([1]), T([1]))
    with pytest.raises(InvalidInput, match="must be tensors"):
        relu(np.ones(2))
    with pytest.raises(InvalidModel):
        sonnx.get_op(helper.make_node("Relu", ["x"], ["y"], alpha=1.0))
    with pytest.raises(UnsupportedModel):
        sonnx.get_op(helper.make_node("Reluu", ["x"], ["y"]))


def test_padding_of_handles():
    x = T(np.zeros((1, 1, 5, 6)))
    pool = autograd.PoolingHandle((3, 2), (1, 1), (1, 0, 1, 0))
    assert utils.same_pad_shape_check(pool, "SAME_UPPER", x) == [2, 1]
    conv = layer.Conv2d(1, 3, padding=1)
    assert utils.same_pad_shape_check(conv.handle, "SAME_LOWER", x.data) == [2, 2]
    with pytest.raises(InvalidInput, match=r"must be \[1, 0, 1, 0\], got \[0, 0, 0, 0\]"):
        utils.same_pad_shape_check(autograd.PoolingHandle((3, 2), (1, 1)), "SAME_UPPER", x)
    with pytest.raises(InvalidInput, match="sizes of its window"):
        utils.same_pad_shape_check(autograd.ConvHandle(), "SAME_UPPER", x)
    again = utils.re_new_handle(pool, x, True)
    assert again == pool and again is not pool
    with pytest.raises(InvalidInput, match="does not match"):
        utils.re_new_handle(pool, x)
    with pytest.raises(InvalidInput, match="must have 4 axes"):
        utils.re_new_handle(conv.handle, T([1]))


def test_images_of_a_size_and_samples():
    image = pytest.importorskip("PIL.Image")
    assert image_tool.resize_by_hw(image.new("RGB", (7, 5)), (4, 6)).size == (6, 4)
    with pytest.raises(InvalidInput, match="at least 1"):
        image_tool.resize_by_hw(image.new("RGB", (7, 5)), (0, 6))
    made = image_tool.get_list_sample([5, 3, 9, 1], 3)
    assert len(made) == 3 and made == [v for v in [5, 3, 9, 1] if v in made]
    with pytest.raises(InvalidInput, match=r"\[0, 2\]"):
        image_tool.get_list_sample([1, 2], 3)


def test_last_layers_outside_tells_of_the_shift():
    rep = sonnx.prepare(file_with("Relu"))
    with pytest.raises(InvalidInput, match="its -3 is -2 here") as refused:
        rep.run([np.ones(2, np.float32)], last_layers=-3)
    assert refused.value.code == "SX304"


GPU_CALLS = {
    "create_cuda_gpu": (), "create_cuda_gpu_on": (1,), "create_cuda_gpus": (2,), "create_cuda_gpus_on": ([0, 1],),
    "get_gpu_mem_size": (0,), "device_query": (0,), "create_opencl_device": (), "get_num_opencl_platforms": (),
    "get_num_opencl_devices": (),
}  # fmt: skip


@pytest.mark.parametrize("hint", ["", "pass CUDA:0", "use device='CPU', or on a machine with a GPU: install it"])
@pytest.mark.parametrize("name", GPU_CALLS)
def test_a_device_that_cannot_be_created_names_the_cpu(name, hint, monkeypatch):
    def unavailable(*args):
        raise DeviceUnavailable("CUDA:0 cannot be used: no reason", code="SX504", hint=hint)

    monkeypatch.setattr(device, "_cuda", {})
    monkeypatch.setattr(device, "Device", unavailable)
    with pytest.raises(DeviceUnavailable) as refused:
        getattr(device, name)(*GPU_CALLS[name])
    assert refused.value.hint.count("create_cpu_device()") == 1 and "device='CPU'" not in refused.value.hint
    assert refused.value.hint.rstrip("; ") == refused.value.hint
    assert not device._cuda


def test_every_function_that_needs_a_gpu_is_in_the_list():
    public = {n for n, f in vars(device).items() if inspect.isfunction(f) and f.__module__ == device.__name__}
    without = {"get_default_device", "create_cpu_device", "get_num_gpus", "get_gpu_ids", "enable_lazy_alloc", "resolve"}
    assert {n for n in public if not n.startswith("_")} == {*GPU_CALLS, *without}


@pytest.mark.parametrize("count", [-1, "2", 1.5, True])
def test_a_number_of_gpus_is_a_number(count):
    with pytest.raises(InvalidInput, match="num must be an integer of at least 0") as refused:
        device.create_cuda_gpus(count)
    assert refused.value.code == "SX309" and device.create_cuda_gpus(0) == []
