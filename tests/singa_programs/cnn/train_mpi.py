"""The loop of train_cnn.py in several processes: mpiexec -n 2 python train_mpi.py MODEL DATA FOLDER."""

import argparse

import train_cnn

from singa import opt, tensor

singa_dtype = {"float16": tensor.float16, "float32": tensor.float32}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["cnn", "resnet18", "resnet50", "xceptionnet", "mlp", "alexnet"])
    parser.add_argument("data", choices=["mnist", "cifar10"])
    parser.add_argument("folder")
    parser.add_argument("-p", choices=["float32", "float16"], default="float32", dest="precision")
    parser.add_argument("-m", "--max-epoch", default=2, type=int)
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("-l", "--learning-rate", default=0.005, type=float, dest="lr")
    parser.add_argument("-d", "--dist-option", default="plain", dest="dist_option",
                        choices=["plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold"])  # fmt: skip
    parser.add_argument("-s", "--sparsification", default=0.05, type=float, dest="spars")
    parser.add_argument("-g", "--disable-graph", default=True, action="store_false", dest="graph")
    args = parser.parse_args()
    sgd = opt.SGD(lr=args.lr, momentum=0.9, weight_decay=1e-5, dtype=singa_dtype[args.precision])
    sgd = opt.DistOpt(sgd)
    train_cnn.run(sgd.global_rank, sgd.world_size, sgd.local_rank, args.max_epoch, args.batch_size, args.model, args.data,
                  args.folder, sgd, args.graph, 0, args.dist_option, args.spars, args.precision)  # fmt: skip
