"""Data-parallel training: every rank computes gradients of its own samples; the ranks exchange them and update alike.

The exchange is written in ONNX operators and the all-reduce operators of `ai.singa`, so that a step may be recorded as a graph.
Gradients are collected in buckets, in the order of the backward pass, and each bucket is sent as soon as it is complete.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.collectives import Communicator
from singa_backend.collectives.communicator import number_of
from singa_backend.errors import CommunicationError, InvalidInput
from singa_backend.proto.schemas import SINGA_DOMAIN

from .._core import tape, trace
from .._core.backward import backward
from .._core.sync_norm import SyncGroup
from .._core.tensor import Tensor, op
from .._core.variable import required
from .accumulation import Accumulates, GradientSums
from .buckets import THRESHOLD, Bucket, Buckets, joined, partition_size
from .interrupts import deferred

RESIDUAL, PARTIAL = "residual", "partial"
"""Names of the states that distributed training adds to those of the optimizer."""


class DataParallel(Accumulates):
    """Exchanges gradients between the ranks of a communicator, and updates by an optimizer; see `opt.DistOpt`.

    Args:
        opt: The optimizer.
        communicator: The communicator.
        sync_batch_norm: Whether steps of a Model normalize with the statistics of all ranks.
    """

    def __init__(self, opt: Any, communicator: Communicator, sync_batch_norm: bool = False) -> None:
        self.opt = opt
        self.sync_batch_norm = sync_batch_norm
        self.communicator = communicator
        self.world_size = communicator.size
        self.global_rank = communicator.rank
        self.local_rank = communicator.local_rank
        self._number = number_of(communicator)
        self._residuals: dict[str, Tensor] = {}
        self._partial = Tensor(data=np.zeros(1, np.int64), requires_grad=False, name=PARTIAL)
        self._pending: list[Callable[[], None]] = []
        self._fused: list[Tensor] = []
        self._fused_half: list[Tensor] = []
        self._rows: tuple[int, int] | None = None  # of this rank, and of all, in the next step
        self._has_rows = True
        self._agreed: dict[Any, list[list[str]]] = {}  # the gradients of each kind of step, which all ranks had

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An independent optimizer of the same group."""
        memo[id(self.communicator)] = self.communicator
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update({n: copy.deepcopy(v, memo) for n, v in self.__dict__.items() if n not in ("_pending", "_agreed")})
        made._pending, made._agreed = [], {}
        return made

    @property
    def _sums(self) -> GradientSums:
        sums: GradientSums = self.opt._sums
        return sums

    # --- training

    def set_share(self, rows: int, total: int) -> None:
        """Weight the gradients of this rank in the next step by the samples of its part of a batch.

        The mean over the ranks is then that of all samples, if the loss is a mean over samples. All ranks must call it with one
        `total`, and with numbers of rows whose sum is `total`. A rank without samples computes any one, for example the first of
        the batch, and passes 0.  Without the call, each rank has the same weight.

        Args:
            rows: The number of samples of this rank.
            total: The number of samples of all ranks.

        Raises:
            InvalidInput: `rows` is not in [0, total], or `total` is below 1 (SX386).
        """
        if not 0 <= rows <= total or total < 1:
            raise InvalidInput(f"rows must be in [0, total], with a total of at least 1, got {rows} of {total}", code="SX386")
        self._rows, self._has_rows = (int(rows), int(total)), rows > 0
        self._sums.begin(total, rows * self.world_size / total)

    def sync_group(self) -> SyncGroup | None:
        """The ranks whose samples BatchNormalization uses in the next step.

        Returns:
            None without `sync_batch_norm`, and for one rank.
        """
        if not self.sync_batch_norm or self.world_size == 1:
            return None
        return SyncGroup(self._number, self.world_size, self.global_rank, self._has_rows)

    def _begin(self, weigh: Callable[[], int]) -> None:
        if self._rows is None:
            super()._begin(weigh)
            self._has_rows = True
        self._rows = None  # a step without a call of `set_share` has equal parts

    def __call__(self, loss: Tensor) -> None:
        """Call `backward_and_update`.

        Args:
            loss: The loss of this rank's samples, a Tensor of one element.

        Raises:
            InvalidInput: As for `backward_and_update`.
            CommunicationError: As for `backward_and_update`.
        """
        self.backward_and_update(loss)

    def backward_and_update(self, loss: Tensor, threshold: int = THRESHOLD) -> None:
        """Compute the gradients of a loss, average them over the ranks, and update every parameter.

        Args:
            loss: The loss of this rank's samples, a Tensor of one element.
            threshold: Elements above which a gradient is sent alone, and a bucket is full.

        Raises:
            InvalidInput: As for `Optimizer.call`, or an argument is out of range (SX386).
            CommunicationError: A rank has ended or makes no progress (SX950), or the ranks have other parameters (SX952).
        """

        def exchange(bucket: Bucket) -> Callable[[], Tensor]:
            flat = bucket.flat()
            if op.dtype(flat) == np.float16:  # the sum may be above its largest number
                return self._reduce(self._mean(flat))
            done = self._reduce(flat)
            return lambda: self._mean(done())

        self._train(loss, threshold, ("plain",), exchange)

    def backward_and_update_half(
        self,
        loss: Tensor,
        threshold: int = THRESHOLD,
        clipping: bool = False,
        clip_Value: float = 100.0,
        loss_scale: float = 1.0,
    ) -> None:
        """As `backward_and_update`, but gradients are sent as float16.

        A gradient is divided by the number of ranks before it is rounded to float16, so that the sum does not overflow.

        Args:
            loss: The loss of this rank's samples, a Tensor of one element.
            threshold: Elements above which a gradient is sent alone, and a bucket is full.
            clipping: Whether gradients are cut to [-clip_Value, clip_Value] before they are sent.
            clip_Value: The bound.
            loss_scale: The factor by which the loss is multiplied, and its gradients are divided again after the exchange:
                gradients below 6e-8 are 0 in float16.

        Raises:
            InvalidInput: As for `backward_and_update`, or a parameter is not float32 (SX386).
            CommunicationError: As for `backward_and_update`.
        """
        scale = _bounded("loss_scale", loss_scale, positive=True)
        bound = _bounded("clip_Value", clip_Value, positive=True) if clipping else None

        def exchange(bucket: Bucket) -> Callable[[], Tensor]:
            for p, g in bucket.pairs:
                if op.dtype(p) != np.float32 or op.dtype(g) != np.float32:
                    text = f"{p.name!r} must be float32 for half precision, got {dtypes.onnx_name(op.dtype(p))}"
                    raise InvalidInput(text, code="SX386", hint="use backward_and_update for other dtypes")
            flat = bucket.flat()
            if bound is not None:
                flat = op.Clip(flat, -bound * scale, bound * scale)
            done = self._reduce(_half(self._mean(flat)))
            return lambda: _scaled(op.Cast(done(), to=dtypes.onnx_code(np.float32)), 1 / scale)

        self._train(loss, threshold, ("half", clipping, clip_Value, scale), exchange, scale)

    def backward_and_sparse_update(
        self, loss: Tensor, threshold: int = THRESHOLD, spars: float = 0.05, topK: bool = False, corr: bool = True
    ) -> None:
        """As `backward_and_update`, but only the largest values of each bucket are sent.

        Values that are not sent stay in a residual, which is added to the next gradient (error feedback).

        Args:
            loss: The loss of this rank's samples, a Tensor of one element.
            threshold: Elements above which a gradient is sent alone, and a bucket is full.
            spars: If `topK`, the share of values that are sent; otherwise the magnitude from which a value is sent.
            topK: Whether each rank sends the ceil(spars * n) values of largest magnitude of a bucket of n.
            corr: Whether the values that are not sent are kept for the next step; otherwise they are dropped.

        Raises:
            InvalidInput: As for `backward_and_update`.
            CommunicationError: As for `backward_and_update`.
        """
        share = share_of(spars, topK)

        def exchange(bucket: Bucket) -> Callable[[], Tensor]:
            residuals = [self._residual(p) for p, _ in bucket.pairs] if corr else []
            flat = bucket.flat()
            if residuals:
                flat = op.Add(flat, op.cast(joined(residuals), flat))
            done, rest = self._sparse(flat, share, topK)
            for t, part in zip(residuals, bucket.split(rest), strict=True) if residuals else ():
                trace.assign(t, op.cast(part, t).raw)
            return lambda: self._mean(done())

        self._train(loss, threshold, ("sparse", str(spars), topK, corr), exchange)

    def backward_and_partial_update(self, loss: Tensor, threshold: int | None = None) -> None:
        """Update every parameter by this rank's own gradient, then average one partition of the parameters over the ranks.

        Each call averages the next partition, so that every parameter is averaged once in as many calls as there are
        partitions.  A parameter with more than `threshold` elements is a partition; the others are grouped in the order of
        the backward pass.  The states of the optimizer are not exchanged.

        Args:
            loss: The loss of this rank's samples, a Tensor of one element.
            threshold: Elements above which a parameter is a partition alone, and a partition is full; None for 2,097,152, or
                less than half of all elements if that is lower, so that no call sends all of several parameters.

        Raises:
            InvalidInput: As for `backward_and_update`.
            CommunicationError: As for `backward_and_update`.
        """
        if tape.is_measuring():
            return
        if threshold is not None:
            _threshold(threshold)
        self._sums.take(self._gradients(loss), ("partial", threshold), partial(self._update_partially, threshold))

    def _update_partially(self, threshold: int | None, found: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Update by this rank's own gradients, and average one partition of the parameters."""
        trace.depends(self._partial, self._turn)
        trace.depends(self, self._settings)
        pairs = list(found)
        threshold = partition_size(pairs) if threshold is None else threshold
        buckets = Buckets(_threshold(threshold))
        partitions = [bucket for p, g in pairs for bucket in buckets.add(p, p)] + buckets.rest()
        pairs = list(self._compared(("partial", threshold), iter(pairs)))
        self.opt._update_all(pairs)
        turn = self._turn() % len(partitions)
        with tape.no_tape():
            chosen = partitions[turn]
            mean = self._mean(self._reduce(chosen.flat())())
            for (p, _), part in zip(chosen.pairs, chosen.split(mean), strict=True):
                trace.assign(p, op.cast(part, p).raw)
            trace.assign(self._partial, op.full_like(self._partial, (turn + 1) % len(partitions)).raw)
        self.opt.step()

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Divide a gradient, the sum over the ranks, by their number, in place, and update the parameter.

        Args:
            param: The parameter.
            grad: The sum of its gradients, of the same shape.

        Raises:
            InvalidInput: If the gradient (SX329) or a loaded state (SX327) has another shape.
        """
        if self.world_size > 1:
            with tape.no_tape():
                trace.assign(grad, self._mean(grad).raw)
        self.opt.update(param, grad)

    def _train(
        self,
        loss: Tensor,
        threshold: int,
        mode: tuple[Any, ...],
        exchange: Callable[[Bucket], Callable[[], Tensor]],
        scale: float = 1.0,
    ) -> None:
        """One step: send each bucket when it is complete, then wait for all, and update; or add the gradients to the sums.

        Args:
            loss: The loss.
            threshold: Elements of a full bucket.
            mode: The kind of the exchange and its arguments, equal on all ranks.
            exchange: Starts the exchange of a bucket; returns a function that waits for its mean gradient.
            scale: The factor of the loss.
        """
        if not tape.is_measuring():
            _threshold(threshold)
            finish = partial(self._exchange_and_update, threshold, mode, exchange)
            self._sums.take(self._gradients(loss, scale), (*mode, threshold), finish)

    def _exchange_and_update(
        self,
        threshold: int,
        mode: tuple[Any, ...],
        exchange: Callable[[Bucket], Callable[[], Tensor]],
        pairs: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        """Send each bucket of gradients when it is complete, then wait for all, and update."""
        trace.depends(self, self._settings)
        buckets = Buckets(_threshold(threshold))
        sent: list[tuple[Bucket, Callable[[], Tensor]]] = []

        def send(complete: Iterable[Bucket]) -> None:
            with tape.no_tape():
                sent.extend((bucket, exchange(bucket)) for bucket in complete)

        for p, g in self._compared((*mode, threshold), iter(pairs)):
            send(buckets.add(p, g))
            self.communicator.progress()
        send(buckets.rest())
        means: dict[int, Tensor] = {}
        with tape.no_tape():
            for bucket, done in sent:
                means |= {id(p): g for (p, _), g in zip(bucket.pairs, bucket.split(done()), strict=True)}
        with deferred():
            self.opt._update_all([(p, means[id(p)]) for p in buckets.order])
            self.opt.step()

    def _gradients(self, loss: Tensor, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        if self.opt.check_nan:
            self.opt._refuse_nan(loss)
        return ((p, g) for p, g in backward(loss, self._sums.seed(loss, scale)) if p.is_dummy())

    def _settings(self) -> tuple[Any, ...]:
        """What a recorded step contains as constants."""
        return (self._number, self.world_size, self.sync_batch_norm, self._has_rows)

    def _turn(self) -> int:
        """The partition that the next partial update averages; a graph is recorded for each."""
        return int(np.asarray(self._partial.device.backend.get(self._partial._data)).reshape(-1)[0])

    # --- exchanges of flat values

    def _reduce(self, flat: Tensor) -> Callable[[], Tensor]:
        """Start the sum of a vector; return a function that waits for it."""
        if self.world_size == 1:  # without an exchange a recorded step may be repeated, and so runs by a plan
            return lambda: flat
        ticket = op.AllReduceStart(flat, communicator=self._number, domain=SINGA_DOMAIN)
        return lambda: op.AllReduceDone(flat, ticket, domain=SINGA_DOMAIN)

    def _sparse(self, flat: Tensor, share: Fraction, topK: bool) -> tuple[Callable[[], Tensor], Tensor]:
        """Start the sum of the largest values of a vector; return a function that waits for it, and the values left over."""
        size = flat.size()
        magnitude = op.Abs(flat)
        if topK:
            _, indices = op.TopK(magnitude, [math.ceil(share * size)], axis=0, outputs=2)
            rest = op.ScatterElements(flat, indices, op.full_like(op.Gather(flat, indices), 0), axis=0)
        else:
            chosen = op.Not(op.Less(magnitude, float(share)))
            indices = op.Squeeze(op.NonZero(chosen), [0])  # a NaN is sent too
            rest = op.Where(chosen, op.full_like(flat, 0), flat)
        values = op.Gather(flat, indices)
        ticket = op.SparseAllReduceStart(indices, values, communicator=self._number, equal=int(topK), domain=SINGA_DOMAIN)
        return lambda: op.AllReduceDone(flat, ticket, domain=SINGA_DOMAIN), rest

    def _mean(self, total: Tensor) -> Tensor:
        return total if self.world_size == 1 else op.Div(total, float(self.world_size))

    def _residual(self, p: Tensor) -> Tensor:
        """The values of a parameter's gradient that were not sent yet."""
        key = self.opt._key(p.name, p)
        t = self._residuals.get(key)
        if t is None or tuple(t.shape) != tuple(p.shape):
            if t is not None:
                what = f"the state {RESIDUAL}.{key} must have the parameter's shape {p.shape}, got {t.shape}"
                raise InvalidInput(what, code="SX327", hint="it belongs to another model")
            t = Tensor(p.shape, p.device, _residual_dtype(op.dtype(p)), requires_grad=False, name=f"{RESIDUAL}.{key}")
            self._residuals[key] = t
        elif t.device is not p.device:
            t.to_device(p.device)
        return t

    def _compared(self, key: Any, pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradients of a step, in order; raises CommunicationError unless all ranks exchange the same in the same way.

        The ranks compare the gradients of the first step of each kind, and of a step that differs from those before, such as
        after parameters were frozen; before a gradient is sent whose place another one had.
        """
        if trace.current() is not None:
            yield from pairs
            return
        known = likely = self._agreed.setdefault(key, [])
        mine: list[str] = []
        for p, g in pairs:
            mine.append(self._described(p))
            likely = [one for one in likely if one[len(mine) - 1 : len(mine)] == mine[-1:]]
            if not likely:
                rest = [(p, g), *pairs]
                mine += [self._described(p) for p, _ in rest[1:]]
                self._compare("gradients", [repr(key), *mine])
                known.append(mine)
                yield from rest
                return
            yield p, g
        if mine not in likely:
            self._compare("gradients", [repr(key), *mine])
            known.append(mine)

    def _described(self, p: Tensor) -> str:
        return f"{self.opt._key(p.name, p)} {op.dtype(p)} {tuple(p.shape)}"

    def _compare(self, what: str, lines: Sequence[str]) -> None:
        """Raise CommunicationError unless these lines of text are equal on all ranks."""
        if self.world_size == 1:
            return
        digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8).astype(np.int64)
        t = Tensor(data=np.zeros((self.world_size, len(digest)), np.int64), requires_grad=False)
        t.device.backend.write(t._data, digest, self.global_rank)
        self.all_reduce(t)
        self.wait()
        other = [r for r, theirs in enumerate(np.asarray(t._data)) if not np.array_equal(theirs, digest)]
        if other:
            shown = ", ".join(lines[1:4]) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
            raise CommunicationError(
                f"all ranks must exchange the same {what} in one order, but rank {other[0]} differs from rank "
                f"{self.global_rank}, which has {shown}",
                code="SX952",
                hint="build the same model with the same arguments on every rank",
            )

    # --- primitives

    def all_reduce(self, t: Any) -> None:
        """Start the sum of a tensor over the ranks, in place; it is there after `wait`.

        Args:
            t: A Tensor, or the storage of one (`t.data`), of a number dtype.
        """
        self._started(t, lambda x: x, lambda x: x)

    def all_reduce_half(self, t: Any) -> None:
        """Start the sum of a float32 tensor over the ranks, sent as float16, in place; it is there after `wait`.

        Args:
            t: A Tensor, or the storage of one (`t.data`), of float32.

        Raises:
            InvalidInput: It is not float32 (SX386).
        """
        _float32(t)
        self._started(t, lambda x: _half(self._mean(x)), self._from_half)

    def fused_all_reduce(self, tensors: Sequence[Any], send: bool = True) -> None:
        """Collect tensors, or start the sum of what was collected, in one operation.

        Args:
            tensors: With `send=False`, Tensors (or their storage) whose values are appended to the buffer. With `send=True`, the
                tensors that the sum of the buffer is written to, in order from its beginning.
            send: Whether to send the buffer, and empty it. Nothing is sent if nothing was appended.

        Raises:
            InvalidInput: The tensors have more elements than the buffer, or another dtype (SX386).
        """
        self._fuse(self._fused, tensors, send, lambda x: x, lambda x: x)

    def fused_all_reduce_half(self, tensors: Sequence[Any], send: bool = True) -> None:
        """As `fused_all_reduce`, for float32 tensors, which are sent as float16.

        Args:
            tensors: As for `fused_all_reduce`.
            send: As for `fused_all_reduce`.

        Raises:
            InvalidInput: A tensor is not float32, or they have more elements than the buffer (SX386).
        """
        for t in tensors:
            _float32(t)
        self._fuse(self._fused_half, tensors, send, lambda x: _half(self._mean(x)), self._from_half)

    def sparsification(self, t: Any, accumulation: Any, spars: float, topK: bool) -> None:
        """Start the sum of the largest values of a tensor over the ranks, in place; it is there after `wait`.

        Args:
            t: A Tensor of floats, or its storage.
            accumulation: The values that were not sent before, of the same shape, which are added, and updated in place; None
                to drop them.
            spars: If `topK`, the share of values that are sent; otherwise the magnitude from which a value is sent.
            topK: Whether each rank sends the ceil(spars * n) values of largest magnitude.

        Raises:
            InvalidInput: `spars` is out of range, or the accumulation has another size (SX386).
        """
        self.fused_sparsification([t], accumulation, spars, topK)

    def fused_sparsification(self, tensors: Sequence[Any], accumulation: Any, spars: float, topK: bool) -> None:
        """As `sparsification`, for several tensors as one vector.

        Args:
            tensors: Tensors of floats of one dtype, or their storage.
            accumulation: The values that were not sent before, with as many elements as all tensors; None to drop them.
            spars: As for `sparsification`.
            topK: As for `sparsification`.

        Raises:
            InvalidInput: `spars` is out of range, or the accumulation has another size (SX386).
        """
        share = share_of(spars, topK)
        with tape.no_tape():
            bucket = Bucket([(_tensor(t), _tensor(t)) for t in tensors])
            flat = bucket.flat()
            if accumulation is not None:
                kept = _tensor(accumulation)
                if kept.size() != flat.size():
                    text = f"the accumulation must have the {flat.size()} elements of the tensors, got {kept.size()}"
                    raise InvalidInput(text, code="SX386")
                flat = op.Add(flat, op.cast(op.Reshape(kept, [-1]), flat))
            done, rest = self._sparse(flat, share, topK)
            if accumulation is not None:
                _write(accumulation, rest)
        self._pending.append(lambda: _write_all(tensors, bucket, done()))

    def wait(self) -> None:
        """Wait for the operations that the primitives have started, and write their results.

        Raises:
            CommunicationError: A rank has ended or makes no progress (SX950).
        """
        pending, self._pending = self._pending, []
        with tape.no_tape():
            for finish in pending:
                finish()

    def broadcast_params(self, params: Any, root: int = 0) -> None:
        """Copy the values of one rank to all ranks, in place.

        Ranks that build a model from the same file or the same seed are equal without it.

        Args:
            params: A model (its states are copied), a dict of Tensors by name, or an iterable of Tensors.
            root: The rank whose values are copied.

        Raises:
            InvalidInput: `root` is not a rank (SX386).
            CommunicationError: The ranks have other names, shapes or dtypes (SX952).
        """
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.world_size:
            raise InvalidInput(f"root must be a rank in [0, {self.world_size}), got {root!r}", code="SX386")
        named = params.get_states() if hasattr(params, "get_states") else params
        if not isinstance(named, Mapping):
            named = {f"{i} {t.name}": t for i, t in enumerate(named)}
        self._compare("parameters", ["", *(f"{n} {t._data.dtype} {tuple(t._data.shape)}" for n, t in named.items())])
        comm = self.communicator
        started = []
        for t in named.values():
            array = t._data if not comm.on_host else np.asarray(t.device.backend.get(t._data), order="C")
            started.append((t, comm.broadcast(array, root)))
        for t, handle in started:
            trace.assign(t, handle.wait())

    def _started(self, t: Any, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        with tape.no_tape():
            done = self._reduce(before(op.Reshape(_tensor(t), [-1])))
        self._pending.append(lambda: _write(t, after(done())))

    def _fuse(
        self,
        buffer: list[Tensor],
        tensors: Sequence[Any],
        send: bool,
        before: Callable[[Tensor], Tensor],
        after: Callable[[Tensor], Tensor],
    ) -> None:
        if not send:
            with tape.no_tape():
                buffer += [op.Add(flat, 0) for t in tensors for flat in [op.Reshape(_tensor(t), [-1])]]
            return
        if not buffer:
            return
        bucket = Bucket([(_tensor(t), _tensor(t)) for t in tensors])
        have, want = sum(t.size() for t in buffer), bucket.size
        if want > have:
            text = f"the tensors must have at most the {have} elements that were collected, got {want}"
            raise InvalidInput(text, code="SX386", hint="pass the tensors to fused_all_reduce(..., send=False) first")
        with tape.no_tape():
            done = self._reduce(before(joined(buffer)))
        buffer.clear()
        self._pending.append(lambda: _write_all(tensors, bucket, op.Slice(after(done()), [0], [want], [0])))

    def _from_half(self, mean: Tensor) -> Tensor:
        return _scaled(op.Cast(mean, to=dtypes.onnx_code(np.float32)), float(self.world_size))

    # --- the optimizer

    @property
    def lr(self) -> Any:
        """The schedule of the learning rate; a number or a DecayScheduler may be assigned."""
        return self.opt.lr

    @lr.setter
    def lr(self, lr: Any) -> None:
        self.opt.lr = lr

    @property
    def lr_value(self) -> Tensor:
        """The learning rate of the current step, a Tensor of shape (1,)."""
        value: Tensor = self.opt.lr_value
        return value

    @property
    def step_counter(self) -> Tensor:
        """The number of steps so far, an int64 Tensor of shape (1,)."""
        counter: Tensor = self.opt.step_counter
        return counter

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the states that each parameter has in the optimizer."""
        kinds: tuple[str, ...] = self.opt.kinds
        return kinds

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        """Update a parameter in place by this gradient, which is not exchanged.

        Args:
            param_name: Key of its states.
            param_value: The parameter.
            param_grad: Its gradient, of the same shape.

        Raises:
            InvalidInput: If the gradient (SX329) or a loaded state (SX327) has another shape.
        """
        self.opt.apply(param_name, param_value, param_grad)

    def step(self) -> None:
        """Advance `step_counter` and every hyperparameter that depends on it."""
        self.opt.step()

    def get_states(self) -> dict[str, Tensor]:
        """Collect the states of the optimizer and of the exchange; those of the exchange differ from rank to rank.

        Returns:
            The states of the optimizer, `partial` (the partition that the next partial update averages) and, after a sparse
            update, `residual.<parameter>`.
        """
        residuals = {f"{RESIDUAL}.{name}": t for name, t in self._residuals.items()}
        return {**self.opt.get_states(), PARTIAL: self._partial, **residuals}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Set the states to those that `get_states` of this class, or of the optimizer, returned.

        Args:
            states: Tensors or arrays by name.

        Raises:
            InvalidInput: If a name is unknown, a state is missing, or a shape differs; then nothing is changed (SX327).
        """
        arrays = {n: v.device.backend.get(v.data) if isinstance(v, Tensor) else np.asarray(v) for n, v in states.items()}
        residuals = {n.removeprefix(f"{RESIDUAL}."): a for n, a in arrays.items() if n.startswith(f"{RESIDUAL}.")}
        for name, array in residuals.items():
            mine = self._residuals.get(name)
            if self._residuals and mine is None:
                raise InvalidInput(f"the state {RESIDUAL}.{name} belongs to another model", code="SX327")
            if mine is not None and tuple(mine.shape) != array.shape:
                raise InvalidInput(f"the state {RESIDUAL}.{name} must have shape {mine.shape}, got {array.shape}", code="SX327")
            if not dtypes.is_float(array.dtype):
                raise InvalidInput(f"the state {RESIDUAL}.{name} must be floats, got {array.dtype}", code="SX327")
        turn = arrays.get(PARTIAL)
        if turn is not None and (turn.size != 1 or turn.dtype.kind not in "iu" or turn.min() < 0):
            text = f"{PARTIAL} must have one element, an integer of at least 0, got {turn.dtype} of shape {turn.shape}"
            raise InvalidInput(text, code="SX327")
        self.opt.set_states({n: v for n, v in states.items() if n != PARTIAL and not n.startswith(f"{RESIDUAL}.")})
        for name, mine in self._residuals.items():  # in place: recorded steps hold them; a state without one is of before it
            mine.device.backend.write(mine._data, residuals.pop(name, np.zeros(tuple(mine.shape))).astype(mine._data.dtype))
        for name, array in residuals.items():
            self._residuals[name] = Tensor(data=array.copy(), requires_grad=False, name=f"{RESIDUAL}.{name}")
        if turn is not None:
            self._partial.device.backend.write(self._partial._data, int(turn.reshape(-1)[0]))


def _half(x: Tensor) -> Tensor:
    return op.Cast(x, to=dtypes.onnx_code(np.float16))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else op.Mul(x, factor)


def _tensor(t: Any) -> Tensor:
    """A Tensor, or one with the storage of a Tensor."""
    return required(t) if isinstance(t, Tensor) else Tensor(data=t, requires_grad=False)


def _write(target: Any, value: Tensor) -> None:
    """Write values into a Tensor or its storage."""
    if isinstance(target, Tensor):
        trace.assign(target, op.cast(op.Reshape(value, list(target.shape)), target).raw)
    else:
        backend = value.device.backend
        with backend.active():
            backend.write(target, value._data.reshape(target.shape))


def _write_all(targets: Sequence[Any], bucket: Bucket, flat: Tensor) -> None:
    for target, part in zip(targets, bucket.split(flat), strict=True):
        _write(target, part)


def _float32(t: Any) -> None:
    dtype = op.dtype(t) if isinstance(t, Tensor) else t.dtype
    if dtype != np.float32:
        raise InvalidInput(f"a tensor that is sent as float16 must be float32, got {dtypes.onnx_name(dtype)}", code="SX386")


def _residual_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _bounded(name: str, value: Any, positive: bool = False) -> float:
    """A finite number of at least 0; raises InvalidInput (SX386)."""
    number = float(value) if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise InvalidInput(f"{name} must be a number {'above' if positive else 'of at least'} 0, got {value!r}", code="SX386")
    return number


def share_of(spars: Any, topK: bool) -> Fraction:
    """The share of values to send, as its decimal digits specify it, or without `topK` their bound; raises InvalidInput."""
    if not topK:
        return Fraction(_bounded("spars", spars))
    if not 0 < _bounded("spars", spars) <= 1:
        raise InvalidInput(f"spars must be in (0, 1] for topK, got {spars!r}", code="SX386")
    return Fraction(repr(float(spars)))


def _threshold(threshold: Any) -> int:
    if isinstance(threshold, bool) or not isinstance(threshold, (int, np.integer)) or threshold < 0:
        raise InvalidInput(f"threshold must be an integer of at least 0, got {threshold!r}", code="SX386")
    return int(threshold)
