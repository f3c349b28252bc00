"""The common loop of the convolutional nets: data by name, model by name, one step per batch, accuracy after each epoch."""

import argparse
import time

import numpy as np
from PIL import Image

from singa import device, opt, tensor
from singa import singa_wrap as singa

np_dtype = {"float16": np.float16, "float32": np.float32}
singa_dtype = {"float16": tensor.float16, "float32": tensor.float32}


def augmentation(x, batch_size):
    xpad = np.pad(x, [[0, 0], [0, 0], [4, 4], [4, 4]], "symmetric")
    for i in range(batch_size):
        top, left = np.random.randint(8, size=2)
        x[i] = xpad[i, :, top : top + x.shape[2], left : left + x.shape[2]]
        if np.random.randint(2):
            x[i] = x[i, :, :, ::-1]
    return x


def accuracy(pred, target):
    return np.array(np.argmax(pred, axis=1) == target, "int").sum()


def partition(global_rank, world_size, train_x, train_y, val_x, val_y):
    n, m = train_x.shape[0] // world_size, val_x.shape[0] // world_size
    a, b = slice(global_rank * n, (global_rank + 1) * n), slice(global_rank * m, (global_rank + 1) * m)
    return train_x[a], train_y[a], val_x[b], val_y[b]


def reduce_variable(variable, dist_opt, reducer):
    reducer.copy_from_numpy(variable)
    dist_opt.all_reduce(reducer.data)
    dist_opt.wait()
    return tensor.to_numpy(reducer)


def resize_dataset(x, image_size):
    made = np.zeros((x.shape[0], x.shape[1], image_size, image_size), np.float32)
    for n in range(x.shape[0]):
        for d in range(x.shape[1]):
            made[n, d] = np.array(Image.fromarray(x[n, d]).resize((image_size, image_size), Image.BILINEAR), dtype=np.float32)
    return made


def run(global_rank, world_size, local_rank, max_epoch, batch_size, model, data, folder, sgd, graph, verbosity,
        dist_option="plain", spars=None, precision="float32"):  # fmt: skip
    if getattr(singa, "USE_CUDA", False):
        dev = device.create_cuda_gpu_on(local_rank)
    else:
        dev = device.get_default_device()
    dev.SetRandSeed(0)
    np.random.seed(0)

    if data == "cifar10":
        from data import cifar10

        train_x, train_y, val_x, val_y = cifar10.load(folder)
    else:
        from data import mnist

        train_x, train_y, val_x, val_y = mnist.load(folder)
    num_channels = train_x.shape[1]
    image_size = train_x.shape[2]
    data_size = np.prod(train_x.shape[1 : train_x.ndim]).item()
    num_classes = (np.max(train_y) + 1).item()

    if model in ("resnet18", "resnet50"):
        from model import resnet

        model = getattr(resnet, model)(num_channels=num_channels, num_classes=num_classes)
    elif model == "xceptionnet":
        from model import xceptionnet

        model = xceptionnet.create_model(num_channels=num_channels, num_classes=num_classes)
    elif model == "alexnet":
        from model import alexnet

        model = alexnet.create_model(num_channels=num_channels, num_classes=num_classes)
    elif model == "cnn":
        from model import cnn

        model = cnn.create_model(num_channels=num_channels, num_classes=num_classes)
    else:
        import os
        import sys

        sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        from mlp import model as mlp

        model = mlp.create_model(data_size=data_size, num_classes=num_classes)

    if hasattr(sgd, "communicator"):
        DIST = True
        sequential = True
    else:
        DIST = False
        sequential = False
    if DIST:
        train_x, train_y, val_x, val_y = partition(global_rank, world_size, train_x, train_y, val_x, val_y)

    if model.dimension == 4:
        tx = tensor.Tensor((batch_size, num_channels, model.input_size, model.input_size), dev, singa_dtype[precision])
    elif model.dimension == 2:
        tx = tensor.Tensor((batch_size, data_size), dev, singa_dtype[precision])
        train_x = np.reshape(train_x, (train_x.shape[0], -1))
        val_x = np.reshape(val_x, (val_x.shape[0], -1))
    ty = tensor.Tensor((batch_size,), dev, tensor.int32)
    num_train_batch = train_x.shape[0] // batch_size
    num_val_batch = val_x.shape[0] // batch_size
    idx = np.arange(train_x.shape[0], dtype=np.int32)

    model.set_optimizer(sgd)
    model.compile([tx], is_train=True, use_graph=graph, sequential=sequential)
    dev.SetVerbosity(verbosity)

    for epoch in range(max_epoch):
        start_time = time.time()
        np.random.shuffle(idx)
        if global_rank == 0:
            print(f"Starting Epoch {epoch}:")
        train_correct = np.zeros(shape=[1], dtype=np.float32)
        test_correct = np.zeros(shape=[1], dtype=np.float32)
        train_loss = np.zeros(shape=[1], dtype=np.float32)

        model.train()
        for b in range(num_train_batch):
            x = train_x[idx[b * batch_size : (b + 1) * batch_size]]
            if model.dimension == 4:
                x = augmentation(x, batch_size)
                if image_size != model.input_size:
                    x = resize_dataset(x, model.input_size)
            x = x.astype(np_dtype[precision])
            y = train_y[idx[b * batch_size : (b + 1) * batch_size]]
            tx.copy_from_numpy(x)
            ty.copy_from_numpy(y)
            out, loss = model(tx, ty, dist_option, spars)
            train_correct += accuracy(tensor.to_numpy(out), y)
            train_loss += tensor.to_numpy(loss)[0]
        if DIST:
            reducer = tensor.Tensor((1,), dev, tensor.float32)
            train_correct = reduce_variable(train_correct, sgd, reducer)
            train_loss = reduce_variable(train_loss, sgd, reducer)
        if global_rank == 0:
            share = train_correct[0] / (num_train_batch * batch_size * world_size)
            print("Training loss = %f, training accuracy = %f" % (train_loss[0], share), flush=True)

        model.eval()
        for b in range(num_val_batch):
            x = val_x[b * batch_size : (b + 1) * batch_size]
            if model.dimension == 4 and image_size != model.input_size:
                x = resize_dataset(x, model.input_size)
            x = x.astype(np_dtype[precision])
            y = val_y[b * batch_size : (b + 1) * batch_size]
            tx.copy_from_numpy(x)
            ty.copy_from_numpy(y)
            out_test = model(tx)
            test_correct += accuracy(tensor.to_numpy(out_test), y)
        if DIST:
            reducer = tensor.Tensor((1,), dev, tensor.float32)
            test_correct = reduce_variable(test_correct, sgd, reducer)
        if global_rank == 0:
            share = test_correct[0] / (num_val_batch * batch_size * world_size)
            print("Evaluation accuracy = %f, Elapsed Time = %fs" % (share, time.time() - start_time), flush=True)
    dev.PrintTimeProfiling()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["cnn", "resnet18", "resnet50", "xceptionnet", "mlp", "alexnet"])
    parser.add_argument("data", choices=["mnist", "cifar10"])
    parser.add_argument("folder")
    parser.add_argument("-p", choices=["float32", "float16"], default="float32", dest="precision")
    parser.add_argument("-m", "--max-epoch", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("-l", "--learning-rate", default=0.005, type=float, dest="lr")
    parser.add_argument("-i", "--device-id", default=0, type=int)
    parser.add_argument("-g", "--disable-graph", default=True, action="store_false", dest="graph")
    parser.add_argument("-v", "--log-verbosity", default=0, type=int, dest="verbosity")
    args = parser.parse_args()
    sgd = opt.SGD(lr=args.lr, momentum=0.9, weight_decay=1e-5, dtype=singa_dtype[args.precision])
    run(0, 1, args.device_id, args.max_epoch, args.batch_size, args.model, args.data, args.folder, sgd, args.graph,
        args.verbosity, precision=args.precision)  # fmt: skip
