"""A recurrent layer over word vectors, and two dense layers."""

from singa import autograd, layer, model


class IMDBModel(model.Model):
    def __init__(self, hidden_size, mode="lstm", return_sequences=False, bidirectional="False", num_layers=1, use_mask=False):
        super().__init__()
        self.use_mask = use_mask
        self.lstm = layer.CudnnRNN(hidden_size=hidden_size, num_layers=num_layers, bidirectional=bidirectional,
                                   return_sequences=return_sequences, rnn_mode=mode, batch_first=True,
                                   use_mask=use_mask)  # fmt: skip
        self.l1 = layer.Linear(8)
        self.l2 = layer.Linear(2)
        self.optimizer = None

    def forward(self, x, seq_lengths=None):
        y = self.lstm(x, seq_lengths=seq_lengths) if self.use_mask else self.lstm(x)
        y = autograd.reshape(y, (y.shape[0], -1))
        y = autograd.relu(self.l1(y))
        return self.l2(y)

    def train_one_batch(self, x, y, seq_lengths=None):
        out = self.forward(x, seq_lengths)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss

    def set_opt(self, optimizer):
        self.optimizer = optimizer
