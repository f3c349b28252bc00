"""Train a generator against a discriminator on the pickled MNIST."""

import argparse
import gzip
import pickle

import numpy as np
from model import gan_mlp

from singa import device, opt, tensor


class VANILLA:
    def __init__(self, kind, path, noise_size=6, hidden_size=16, batch=16, interval=20, learning_rate=0.001, iterations=60):
        with gzip.open(path, "rb") as f:
            (self.train_x, _), _, _ = pickle.load(f, encoding="latin1")
        self.feature_size = self.train_x.shape[1]
        self.noise_size, self.batch_size = noise_size, batch
        self.interval, self.lr, self.iterations = interval, learning_rate, iterations
        self.model = kind.create_model(noise_size=noise_size, feature_size=self.feature_size, hidden_size=hidden_size)

    def train(self, dev):
        dev.SetRandSeed(0)
        np.random.seed(0)
        sgd = opt.Adam(lr=self.lr)
        noise = tensor.Tensor((self.batch_size, self.noise_size), dev, tensor.float32)
        real_images = tensor.Tensor((self.batch_size, self.feature_size), dev, tensor.float32)
        real_labels = tensor.Tensor((self.batch_size, 1), dev, tensor.float32)
        fake_labels = tensor.Tensor((self.batch_size, 1), dev, tensor.float32)
        self.model.set_optimizer(sgd)
        self.model.compile([noise], is_train=True, use_graph=False, sequential=True)
        real_labels.set_value(1.0)
        fake_labels.set_value(0.0)
        for iteration in range(self.iterations):
            idx = np.random.randint(0, self.train_x.shape[0], self.batch_size)
            real_images.copy_from_numpy(self.train_x[idx])
            self.model.train()
            _, d_loss_real = self.model.train_one_batch_dis(real_images, real_labels)
            noise.uniform(-1, 1)
            fake_images = self.model.forward_gen(noise)
            _, d_loss_fake = self.model.train_one_batch_dis(fake_images, fake_labels)
            d_loss = tensor.to_numpy(d_loss_real)[0] + tensor.to_numpy(d_loss_fake)[0]
            noise.uniform(-1, 1)
            _, g_loss_tensor = self.model.train_one_batch(noise, real_labels)
            g_loss = tensor.to_numpy(g_loss_tensor)[0]
            if iteration % self.interval == 0:
                self.model.eval()
                self.save_image(iteration, dev)
                print(f"The {iteration} iteration, G_LOSS: {g_loss}, D_LOSS: {d_loss}")

    def save_image(self, iteration, dev):
        if not hasattr(self, "demo_noise"):
            self.demo_noise = tensor.Tensor((25, self.noise_size), dev, tensor.float32)
        self.demo_noise.uniform(-1, 1)
        gen_imgs = tensor.to_numpy(self.model.forward_gen(self.demo_noise))
        print("mean distance", np.abs(gen_imgs.mean(0) - self.train_x.mean(0)).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    args = parser.parse_args()
    gan = VANILLA(gan_mlp, args.path, iterations=100, interval=99, learning_rate=0.005)
    gan.train(device.get_default_device())
