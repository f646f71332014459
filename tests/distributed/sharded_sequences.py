"""Trainers that give each rank a part of every sequence: accelerate's, transformers' and TRL's.

Run by tests/distributed/test_trainers.py, as the checks of tests/distributed/trainers.py are. Here
accelerate takes CPUs for GPUs, because it shards models and sequences on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_gather_tensor_autograd

from tests.distributed import trainers
from tests.distributed.processes import checks_in
from tests.distributed.trainers import CLASSES, HEAD, MICRO_BATCHES, STEPS, Trained


@contextmanager
def as_gpus() -> Iterator[None]:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    with trainers.launched(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        found = ("gloo", DistributedType.MULTI_GPU)
        patch.setattr(PartialState, "_prepare_backend", lambda *_: found)
        yield
        trainers.forget_states()


class ShiftedModel(trainers.LanguageModel):
    """Its loss is transformers', of labels that were shifted before they were sharded."""

    def forward(self, tokens: Tensor, labels: Tensor, count: Any) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        logits = self.head(self.hidden(tokens))
        return ForCausalLMLoss(logits, None, CLASSES, num_items_in_batch=count, shift_labels=labels)


def accelerate(sequences: int) -> None:
    """accelerate's FSDP2, and its context, whose end does not restore the batch.

    Args:
        sequences: over how many ranks each is sharded; the others have other batches.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    ranks = dist.get_world_size()
    data, part = ranks // sequences, dist.get_rank() // sequences

    def train(compiled: Callable[..., Any]) -> Trained:
        trainers.forget_states()
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(dp_shard_size=data, cp_size=sequences),
        )
        torch.manual_seed(0)
        model = ShiftedModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        wrapped, optimizer = accelerator.prepare(compiled(model), optimizer)
        losses = []
        for step in range(STEPS):
            count, total = torch.tensor(trainers.counted(step, data)), torch.zeros(())
            for micro_batch in range(MICRO_BATCHES):
                buffers = list(trainers.batch(step, micro_batch, part))
                with accelerator.maybe_context_parallel(
                    buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
                ):
                    loss = wrapped(*buffers, count) * ranks
                    accelerator.backward(loss)
                total += loss.detach() / ranks
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(total).item())
        return losses, trainers.weights(model)

    with as_gpus():
        trainers.trains_as_stock(train, trainers.alone(data))


def check_accelerate_fsdp2() -> None:
    accelerate(sequences=1)


def check_accelerate_context_parallel() -> None:
    accelerate(sequences=dist.get_world_size())


def gathered_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of sharded sequences, in place of torch's ring attention, which has no form
    for CPUs: keys and values of all ranks are gathered."""
    every = all_gather_tensor(position_ids, 1, dist.group.WORLD)
    later = position_ids[:, None, :, None] < every[:, None, None, :]
    key, value = (all_gather_tensor_autograd(each, 2, dist.group.WORLD) for each in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def context_parallel(train: Callable[..., Trained], op: str | None, **options: Any) -> None:
    """A trainer of transformers with FSDP2 and context parallelism of all ranks."""
    from accelerate.utils import ParallelismConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def trained(folder: str) -> Trained:
        trainers.forget_states()
        sharded = ParallelismConfig(cp_size=dist.get_world_size())
        fsdp = {"fsdp": True, "fsdp_config": {"version": 2}}
        return train(folder, use_cpu=False, parallelism_config=sharded, **fsdp)

    with as_gpus(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", gathered_attention)
        trainers.by_trainer(trained, op, **options)


def check_trainer_context_parallel() -> None:
    """The head is in the root's group, as FSDP2 otherwise gives it hooks of its own."""
    train = partial(trainers.trainer_on, is_wrapped=False)
    context_parallel(train, HEAD, lazy_logits=True)


def check_sft_trainer_context_parallel() -> None:
    """Each rank has two parts of a sequence, so that its length is a multiple of twice as many."""
    multiple = 2 * dist.get_world_size()
    context_parallel(partial(trainers.sft_on, pad_to_multiple_of=multiple), None)


#: What DeepSpeed asks for, and is told by the trainer.
SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def sequence_parallel(train: Callable[..., Trained], op: str | None, **options: Any) -> None:
    """A trainer of transformers with DeepSpeed's sequence parallelism of all ranks, which exchanges
    parts of sequences for heads of attention, and weighs the ranks' means with their tokens."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def trained(folder: str) -> Trained:
        trainers.forget_states()
        parallel_state_sp._release_sequence_parallel_groups()
        sharded = ParallelismConfig(
            sp_size=dist.get_world_size(),
            sp_backend="deepspeed",
            sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
        )
        settings = dict.fromkeys(SIZES, "auto") | {"zero_optimization": {"stage": 2}}
        # DeepSpeed gives the parts of several sequences as views that the loss can't flatten.
        own = {"per_device_train_batch_size": 1, "use_cpu": False, "deepspeed": settings}
        with pytest.MonkeyPatch.context() as patch:  # DeepSpeed replaces it
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"])
            return train(folder, parallelism_config=sharded, **own)

    with as_gpus(), trainers.deepspeed_on_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        trainers.by_trainer(trained, op, **options)


def check_trainer_sequence_parallel() -> None:
    sequence_parallel(trainers.trainer_on, HEAD, lazy_logits=True)


def check_sft_trainer_sequence_parallel() -> None:
    """The ranks' batches are padded to one length."""
    sequence_parallel(partial(trainers.sft_on, pad_to_multiple_of=16), None)


CHECKS = checks_in(globals())
