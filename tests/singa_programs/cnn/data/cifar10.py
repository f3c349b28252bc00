"""The pickled batches of CIFAR-10."""

import os
import pickle

import numpy as np


def load_dataset(filepath):
    with open(filepath, "rb") as fd:
        stored = pickle.load(fd, encoding="latin1")
    image = stored["data"].astype(dtype=np.uint8).reshape((-1, 3, 32, 32))
    label = np.asarray(stored["labels"], dtype=np.uint8)
    return image, label.reshape(label.size, 1)


def load(dir_path):
    parts = [load_dataset(os.path.join(dir_path, f"data_batch_{i}")) for i in (1, 2)]
    val_x, val_y = load_dataset(os.path.join(dir_path, "test_batch"))
    train_x = np.concatenate([p[0] for p in parts]).astype(np.float32) / 255
    train_y = np.concatenate([p[1] for p in parts])
    mean, std = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
    val_x = val_x.astype(np.float32) / 255
    for i in range(3):
        for x in (train_x, val_x):
            x[:, i] = (x[:, i] - mean[i]) / std[i]
    return train_x, train_y.astype(np.int32).flatten(), val_x, val_y.astype(np.int32).flatten()
