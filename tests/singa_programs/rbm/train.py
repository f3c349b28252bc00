"""A restricted Boltzmann machine by contrastive divergence, on tensors without autograd."""

import argparse
import gzip
import pickle

import numpy as np

from singa import device, opt, tensor


def load_train_data(file_path):
    with gzip.open(file_path, "rb") as f:
        train_set, valid_set, _ = pickle.load(f, encoding="latin1")
    return train_set[0].astype(np.float32), valid_set[0].astype(np.float32)


def train(data_file, use_gpu, num_epoch=10, batch_size=10, hdim=20):
    lr = 0.005
    weight_decay = 0.0002
    train, valid = load_train_data(data_file)
    vdim = train.shape[1]
    dev = device.create_cuda_gpu() if use_gpu else device.get_default_device()
    dev.SetRandSeed(0)
    tweight = tensor.Tensor((vdim, hdim))
    tweight.gaussian(0.0, 0.1)
    tweight.to_device(dev)
    tvbias = tensor.from_numpy(np.zeros(vdim, dtype=np.float32))
    tvbias.to_device(dev)
    thbias = tensor.from_numpy(np.zeros(hdim, dtype=np.float32))
    thbias.to_device(dev)
    sgd = opt.SGD(lr=lr, momentum=0.9, weight_decay=weight_decay)
    num_train_batch = train.shape[0] // batch_size
    for _epoch in range(num_epoch):
        trainerrorsum = 0.0
        for b in range(num_train_batch):
            tdata = tensor.from_numpy(train[(b * batch_size) : ((b + 1) * batch_size), :])
            tdata.to_device(dev)
            tposhidprob = tensor.mult(tdata, tweight)
            tposhidprob.add_row(thbias)
            tposhidprob = tensor.sigmoid(tposhidprob)
            tposhidrandom = tensor.Tensor(tposhidprob.shape, dev)
            tposhidrandom.uniform(0.0, 1.0)
            tposhidsample = tensor.gt(tposhidprob, tposhidrandom)

            tnegdata = tensor.mult(tposhidsample, tweight.T())
            tnegdata.add_row(tvbias)
            tnegdata = tensor.sigmoid(tnegdata)
            tneghidprob = tensor.mult(tnegdata, tweight)
            tneghidprob.add_row(thbias)
            tneghidprob = tensor.sigmoid(tneghidprob)
            error = tensor.sum(tensor.square(tdata - tnegdata))
            trainerrorsum = error + trainerrorsum

            tgweight = tensor.mult(tnegdata.T(), tneghidprob)
            tgweight = tgweight - tensor.mult(tdata.T(), tposhidprob)
            tgvbias = tensor.sum(tnegdata, 0) - tensor.sum(tdata, 0)
            tghbias = tensor.sum(tneghidprob, 0) - tensor.sum(tposhidprob, 0)
            sgd.apply("w", tweight, tgweight)
            sgd.apply("vb", tvbias, tgvbias)
            sgd.apply("hb", thbias, tghbias)
            sgd.step()
        print("training erroraverage = %f" % (tensor.to_numpy(trainerrorsum)[0] / train.shape[0]))
        tvaliddata = tensor.from_numpy(valid)
        tvaliddata.to_device(dev)
        tvalidposhidprob = tensor.mult(tvaliddata, tweight)
        tvalidposhidprob.add_row(thbias)
        tvalidposhidprob = tensor.sigmoid(tvalidposhidprob)
        tvalidposhidrandom = tensor.Tensor(tvalidposhidprob.shape, dev)
        tvalidposhidrandom.uniform(0.0, 1.0)
        tvalidposhidsample = tensor.gt(tvalidposhidprob, tvalidposhidrandom)
        tvalidnegdata = tensor.mult(tvalidposhidsample, tweight.T())
        tvalidnegdata.add_row(tvbias)
        tvalidnegdata = tensor.sigmoid(tvalidnegdata)
        validerrorsum = tensor.sum(tensor.square(tvaliddata - tvalidnegdata))
        print("valid erroraverage = %f" % (tensor.to_numpy(validerrorsum)[0] / valid.shape[0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=str)
    parser.add_argument("--use_gpu", action="store_true")
    args = parser.parse_args()
    train(args.file, args.use_gpu)
