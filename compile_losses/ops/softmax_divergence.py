"""How a divergence ``X`` of two softmaxes becomes ops. Both rows are logits, over a temperature.

``fused::X``             public: checks, autocast and type promotion, then ``X_forward``
``fused::X_forward``     the loss and stats, see ``row_pair``
``fused::X_backward``    the gradients of input and target, each empty where it is not needed
``fused::X_with_grad``   the loss and input's gradient, see ``with_grad``
``fused::X_with_grad_``  the same, the gradient written over input

``fused::X_row_statistics_backward_`` writes over the logits the gradient of the loss of each row
and of other statistics of the same logits, see ``row_statistics``.

Input and target are logits of one shape, of any strides and floating dtypes. Reductions are
``kl_div``'s: 3 (batchmean, the sum over ``input.size(0)``), 1 (mean: over all classes of all rows),
2 (sum); with 0 (none) the loss of each row, the shape without ``dim``. Both arguments are
differentiable. Probabilities are never stored, and one that underflows to 0 has no nan in its
gradient. DTensors may be sharded along any dimension, but along ``dim`` only for
``softmax_kl_div``.

Raises:
    RuntimeError: input and target differ in shape or device; temperature is not positive; DTensors
        sharded along ``dim`` that have no sharded form.
    IndexError: dim is out of range.
    ValueError: unknown reduction.
    NotImplementedError: logits that are not floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_losses import library
from compile_losses.bodies.row_pairs import BATCHMEAN, MEAN, Formulas, RowPair, RowPairs
from compile_losses.distributed import mesh_of
from compile_losses.eager import plain
from compile_losses.ops import checks, row_statistics
from compile_losses.ops.elementwise import Parameter
from compile_losses.ops.row_loss import Signature, declare_row_loss
from compile_losses.ops.row_pair import statistics
from compile_losses.ops.transforms import needs_torch
from compile_losses.ops.with_grad import declare_with_grad
from compile_losses.torch_internals.ops import schema_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def log_softmaxes(
    input: Tensor, target: Tensor, temperature: float, dim: int
) -> tuple[Tensor, Tensor]:
    return F.log_softmax(input / temperature, dim), F.log_softmax(target / temperature, dim)


def reduce(each: Tensor, reduction: int, dim: int) -> Tensor:
    """From what each class adds to the loss."""
    name = checks.reduction_name(reduction)
    if name == "none":
        return each.sum(dim)
    if name == "mean":
        return each.mean()
    return each.sum() if name == "sum" else each.sum() / each.size(0)


def check_temperature(name: str, temperature: float) -> None:
    if not temperature > 0:  # nan is refused, too
        raise RuntimeError(f"{name}: expected temperature to be positive, got {temperature}")


def declare(
    name: str,
    reference: Callable[..., Tensor],
    formulas: Callable[..., Formulas],
    parameters: Sequence[Parameter] = (),
    *,
    check: Callable[..., None] = lambda *_: None,
) -> None:
    """Declares the five ops of the loss ``name``.

    Args:
        reference: the loss in torch's own ops, with X_forward's arguments less its dtype, and in
            logarithms: with probabilities an underflow would make a gradient nan.
        formulas: the loss where there are no kernels, and by the statistics that these save: of the
            dtype of the arithmetic, the parameters and the temperature.
        parameters: what the loss has besides the temperature, by keyword.
        check: raises for bad values of the parameters; called with the name and them.
    """
    public_options = [
        *(p.declaration_with_default for p in parameters),
        "float temperature=1.0, int dim=-1, ScalarType? dtype=None",
    ]
    own_options = "".join(f"{p.declaration}, " for p in parameters)
    options = ", ".join(
        ["int reduction", *(p.declaration for p in parameters), "float temperature, int dim"]
    )
    signature = Signature(name, "Tensor target", options)
    public = library.define(
        f"{name}(Tensor input, Tensor target, int reduction=3, *, {', '.join(public_options)}) "
        "-> Tensor"
    )
    own_names = {p.name for p in parameters}
    own_defaults = [
        (a.name, a.default_value) for a in schema_of(public).arguments if a.name in own_names
    ]

    def check_all(input: Tensor, target: Tensor, *options: Any) -> None:
        reduction, *values, temperature, dim = options
        checks.check_reduction(name, reduction, batchmean=True)
        checks.check_floating(name, input=input, target=target)
        checks.check_same_device(name, input, target=target)
        if not checks.same_shape(target.shape, input.shape):
            raise RuntimeError(
                f"{name}: expected target to have input's shape {list(input.shape)}, "
                f"got {list(target.shape)}"
            )
        if not -input.dim() <= dim < input.dim():
            raise IndexError(
                f"{name}: expected dim to be a dimension of input of shape {list(input.shape)}, "
                f"got {dim}"
            )
        check_temperature(name, temperature)
        check(name, *values)

    def public_kernel(
        input: Tensor,
        target: Tensor,
        reduction: int = 3,
        *,
        temperature: float = 1.0,
        dim: int = -1,
        dtype: torch.dtype | None = None,
        **own: Any,
    ) -> Tensor:
        values = [own.get(key, default) for key, default in own_defaults]
        options: tuple[Any, ...] = (reduction, *values, temperature, dim)
        loss: Tensor
        if dtype is None and input.dtype == target.dtype and plain(input, target):
            check_all(input, target, *options)
            loss, _ = ops.direct_forward.of_plain(input, target, *options, input.dtype)
            return loss
        mesh = mesh_of(name, input=input, target=target)
        check_all(input, target, *options)
        input, target = checks.widened(input, dtype), checks.widened(target, dtype)
        dtype = checks.loss_dtype(dtype, input, target)
        if mesh is not None:
            options = (reduction, *values, temperature, dim % input.dim())
            return of_dtensors(mesh, input, target, options, dtype)
        if needs_torch(input, target):
            return reference(input.to(dtype), target.to(dtype), *options)
        loss, _ = ops.direct_forward(input, target, *options, dtype)
        return loss

    def of_dtensors(
        mesh: DeviceMesh, input: Tensor, target: Tensor, options: Sequence[Any], dtype: torch.dtype
    ) -> Tensor:
        from compile_losses.distributed.divergence import kl_div_of_sharded_classes
        from compile_losses.distributed.elementwise import elementwise

        reduction, *rest = options
        divisors = {"mean": input.numel(), "batchmean": input.size(0)}
        divisor = divisors.get(checks.reduction_name(reduction))
        if name == "softmax_kl_div":
            temperature, dim = rest
            result = kl_div_of_sharded_classes(
                mesh, input, target, reduction, temperature, dim, divisor, dtype
            )
            if result is not None:
                return result

        def loss(input: Tensor, target: Tensor, reduction: int, dtype: torch.dtype) -> Tensor:
            part: Tensor = ops.forward(input, target, reduction, *rest, dtype)[0]
            return part

        return elementwise(
            name,
            mesh,
            loss,
            {"input": input, "target": target},
            input.shape,
            reduction,
            dtype,
            divisor,
            classes=rest[-1],
        )

    library.implement_public(public, public_kernel)

    def forward_fake(input: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *options, dtype = rest
        check_all(input, target, *options)
        reduction, *_, dim = options
        rows = list(input.shape)
        del rows[dim]
        each = reduction == checks.REDUCTIONS["none"]
        return input.new_empty(rows if each else (), dtype=dtype), statistics(input, target, rows)

    def prepare(input: Tensor, target: Tensor, *options: Any) -> RowPair:
        check_all(input, target, *options)
        reduction, *values, temperature, dim = options
        divisors = {MEAN: input.numel(), BATCHMEAN: input.shape[0]}
        dtype = checks.accumulation_type(checks.promoted_dtype(input, target))
        formed = formulas(dtype, *values, temperature)
        return RowPair(name, formed, input, target, dim, reduction, divisors.get(reduction, 1))

    bodies = RowPairs(name, prepare)
    shared_backward = library.define(
        f"{name}_row_statistics_backward_({row_statistics.GRADS}, Tensor(a!) input, "
        f"{row_statistics.SAVED}, Tensor grad_divergence, Tensor teacher, "
        f"Tensor divergence_stats, bool reverse, {own_options}float temperature) -> ()"
    )
    library.register_body(shared_backward, lambda *_: None, bodies.shared_backward)
    library.register_not_differentiable(shared_backward)
    ops = declare_row_loss(signature, reference, check_all, forward_fake, bodies, of_target=True)
    declare_with_grad(name, signature.after_input, forward_fake, bodies)
