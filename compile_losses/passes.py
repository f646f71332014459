"""All passes on graphs, in their order. Each line of the list says what a pass does.

The functions are where :class:`compile_losses.pipeline.Pipeline` is made of them, one for each
stage: :mod:`compile_losses.recognize`, :mod:`compile_losses.lower.plan` and
:mod:`compile_losses.lower.in_place`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The stages, in their order: one on Dynamo's graph, and two on AOTAutograd's graphs.
STAGES = REWRITE, PLAN, IN_PLACE = ("rewrite", "plan", "in_place")


@dataclass(frozen=True)
class Pass:
    """A pass.

    Attributes:
        stage: it runs with the others of this stage.
        short: its name within the stage.
        does: what it does, in words.
        is_needed: whether it runs if any pass of its stage does. It ends what another has begun, or
            keeps numbers right.
    """

    stage: str
    short: str
    does: str
    is_needed: bool = False

    @property
    def name(self) -> str:
        """Its name in COMPILE_LOSSES_PASSES."""
        return f"{self.stage}.{self.short}"


PASSES = (
    Pass(REWRITE, "taken_apart", "what is put together and taken apart is read where it was made"),
    Pass(REWRITE, "columns_apart", "a matrix that is read by columns, too, is computed for these"),
    Pass(REWRITE, "losses", "each loss becomes one op, with the linear layer of its logits"),
    Pass(REWRITE, "both_ways", "losses of a product by rows and by columns become one op"),
    Pass(REWRITE, "shared_logits", "an op takes a head whose logits several losses read"),
    Pass(REWRITE, "plain_logits", "one call reads the rows of held logits, if an entropy is read"),
    Pass(REWRITE, "known_heads", "the heads of other libraries are marked for the plan"),
    Pass(REWRITE, "lazy_logits", "logits that are returned without a loss become lazy"),
    Pass(PLAN, "statistics", "says what statistics of held logits cost"),
    Pass(PLAN, "merge_equal", "equal losses become one"),
    Pass(PLAN, "row_losses", "losses of a few numbers of each row of a head become torch's ops"),
    Pass(PLAN, "counted_rows", "heads leave rows out that no loss counts, which are counted early"),
    Pass(PLAN, "row_gradients", "gradients of unreduced losses of a head go into the forward"),
    Pass(PLAN, "regions", "heads that are read row by row hold no logits, to save memory"),
    Pass(
        PLAN, "two_softmaxes", "softmaxes by rows and by columns of a matrix share one read of it"
    ),
    Pass(PLAN, "kernels", "each loss stays a kernel, with its gradient, or becomes torch's ops"),
    Pass(PLAN, "product_gradients", "gradients of large products are written over these"),
    Pass(PLAN, "head_factors", "losses of a head take the known factors of their gradients"),
    Pass(PLAN, "one_weight", "heads of one weight make one gradient of it"),
    Pass(PLAN, "short_gradients", "gradients that torch reads fewer tensors for become its ops"),
    Pass(PLAN, "elementwise", "gradients of losses without an op go into the forward"),
    Pass(PLAN, "mutated_inputs", "what is made of inputs that change is saved", is_needed=True),
    Pass(IN_PLACE, "buffers", "gradients are written over buffers that nothing reads any more"),
    Pass(IN_PLACE, "markers", "markers of saved gradients are taken out", is_needed=True),
)


def passes_of(stage: str) -> list[Pass]:
    """The passes of a stage, in their order."""
    return [each for each in PASSES if each.stage == stage]
