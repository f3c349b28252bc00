"""Question and answers as vectors of recurrent layers; the right answer is to be nearer than a wrong one."""

from singa import autograd, layer, model


class QAModel(model.Model):
    def __init__(self, hidden_size, num_layers=1, rnn_mode="lstm", batch_first=True, return_sequences=False):
        super().__init__()
        self.lstm_q = layer.CudnnRNN(hidden_size=hidden_size, num_layers=num_layers, bidirectional=True,
                                     rnn_mode=rnn_mode, return_sequences=return_sequences, batch_first=batch_first)  # fmt: skip
        self.lstm_a = layer.CudnnRNN(hidden_size=hidden_size, num_layers=num_layers, bidirectional=True,
                                     rnn_mode=rnn_mode, return_sequences=return_sequences, batch_first=batch_first)  # fmt: skip
        self.optimizer = None

    def vectors(self, q, a_batch):
        return self.lstm_q(q), self.lstm_a(a_batch)

    def forward(self, q, a_batch):
        q, a_batch = self.vectors(q, a_batch)
        bs_a = q.shape[0]
        a_pos, a_neg = autograd.split(a_batch, 0, [bs_a, bs_a])
        return autograd.cossim(q, a_pos), autograd.cossim(q, a_neg)

    def train_one_batch(self, q, a):
        out = self.forward(q, a)
        loss = autograd.ranking_loss(out[0], out[1])
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer):
        self.optimizer = optimizer


class QAModel_maxpooling(QAModel):
    def __init__(self, hidden_size, q_seq, a_seq, **kwargs):
        super().__init__(hidden_size, return_sequences=True, **kwargs)
        self.q_pool = layer.MaxPool2d((q_seq, 1))
        self.a_pool = layer.MaxPool2d((a_seq, 1))

    def vectors(self, q, a_batch):
        found = []
        for rnn, pool, x in ((self.lstm_q, self.q_pool, q), (self.lstm_a, self.a_pool, a_batch)):
            h = rnn(x)
            h = autograd.reshape(h, (h.shape[0], 1, h.shape[1], h.shape[2]))
            h = pool(h)
            found.append(autograd.reshape(h, (h.shape[0], -1)))
        return found


class QAModel_mlp(QAModel):
    def __init__(self, hidden_size):
        super(QAModel, self).__init__()
        self.linear0 = layer.Linear(hidden_size)
        self.linear1 = layer.Linear(hidden_size)

    def vectors(self, q, a_batch):
        q = autograd.reduce_mean(q, [1], keepdims=0)
        a_batch = autograd.reduce_mean(a_batch, [1], keepdims=0)
        return self.linear0(q), self.linear1(a_batch)
