"""The `Bayesian` module: a network whose chosen weights are drawn from a distribution."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from bayesrnn.bayes.binding import Binding, Slot, beside_if_late, without_places
from bayesrnn.bayes.block import Block
from bayesrnn.bayes.charge import Charge, state_of
from bayesrnn.bayes.gradients import draw_of, kl_of, lay, local_kl_of, local_log_ratio_of
from bayesrnn.bayes.hyper import Hyper
from bayesrnn.bayes.kl import Estimator
from bayesrnn.bayes.looking import (
    Gradients,
    Leaves,
    Look,
    bend,
    check_repeatable,
    differentiable,
    keep_only,
    leaves_of_draw,
    refine,
)
from bayesrnn.bayes.posterior import Delta, Tensors
from bayesrnn.bayes.processes import rank_generator
from bayesrnn.engine import Tuning, beside, untraced, untraced_itself
from bayesrnn.errors import require
from bayesrnn.models.dropout import Mask

T = TypeVar("T")


class Bayesian(nn.Module):
    """A network whose chosen weights are drawn from a distribution; `bayesianize` makes one.

    Call it as you would call the wrapped network, which is its `module`. In train mode every
    forward uses a fresh draw, the same for all time steps; in eval mode it uses the posterior mean.
    `weights`, `hold` and `resample` override this. Set `looking` to False to train without looks at
    the data.

    Only the noise of a draw is kept: theta is rebuilt from it in every forward.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[Block],
        priors: Sequence[Hyper],
        slots: Mapping[str, Sequence[Slot]],
    ) -> None:
        super().__init__()
        self.module = module
        self.blocks = nn.ModuleList(blocks)
        self.priors = nn.ModuleList(priors)
        self.binding = Binding(module, blocks, slots)
        module.register_state_dict_post_hook(without_places)
        self._masks = [part for part in module.modules() if isinstance(part, Mask)]
        self.looking = True  # whether posteriors that look at the data do, in training
        self._mode: Literal["auto", "mean", "sample"] = "auto"
        self._holding = False  # the present draw stays over several forwards
        self._keep = False  # the next forward uses the present draw
        self._drawn = False  # the last forward (or resample) used a draw
        self._looked = False  # the present draw has looked at the data
        self._look: Look | None = None  # the last one, where gradients go through it
        self._leaves: Leaves = {}  # theta while gradients are taken at it
        # Weights of the coming forward, what they were made of, and the noise, held on to.
        self._ready: tuple[object, list[Tensors | None], Mapping[Block, Tensors]] | None = None

    # --- drawing --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with its weights drawn or at their mean."""
        # What is exported is one graph. (Older compilers take `is_exporting()` for true anywhere.)
        # What nobody compiles needs no compiler, which takes a second to import.
        if torch.compiler._is_exporting_flag or not torch.compiler.is_dynamo_compiling():
            with self._filled():
                return self.module(*args, **kwargs)
        return self._forward(*args, **kwargs)

    @untraced_itself
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        filled = self._filled()
        _enter(filled)
        try:
            return _run(self.module, *args, **kwargs)
        finally:
            _leave(filled)

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """The wrapped module with its weights and masks."""
        self.binding.place_weights()
        weights = self._prepared() or self._weights()
        with self.binding.bound(weights, self._tuning.dtype), self._masked():
            yield

    @contextmanager
    def weights(self, which: Literal["mean", "sample"]) -> Iterator[None]:
        """Use the posterior mean, or one draw, for the whole block, in train and in eval mode.

        `which` is "mean" or "sample". A draw that is still to be used afterwards (inside `hold`, or
        after `resample`) comes back at the end of the block.
        """
        if which not in ("mean", "sample"):
            raise ValueError(f'weights must be "mean" or "sample", got {which!r}')
        before = (self._mode, self._holding, self._keep)
        draw = (self._drawn, self._looked, self._look)
        wanted = self._holding or self._keep  # a draw that is still to be used afterwards
        held = [block.noise for block in self.each_block()] if wanted else None
        masks = [mask.held for mask in self._masks]
        self._mode, self._holding, self._keep, self._ready = which, True, False, None
        try:
            yield
        finally:
            self._mode, self._holding, self._keep = before
            self._ready = None
            for mask, kept in zip(self._masks, masks, strict=True):
                mask.held = kept
            if held is not None:
                self._drawn, self._looked, self._look = draw
                for block, noise in zip(self.each_block(), held, strict=True):
                    block.noise = noise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Use one draw for all forwards of the block (in train mode)."""
        before = self._holding
        self._holding = True
        try:
            yield
        finally:
            self._holding = before
            self._keep = self._keep and before

    def resample(
        self,
        nll: Callable[[], Tensor] | None = None,
        generator: torch.Generator | None = None,
        around: Literal["draw", "mean"] = "draw",
        looks: int = 1,
    ) -> None:
        """Draw the weights now, for the next forward; inside `hold`, for all forwards.

        - `nll`: runs the model on the batch at hand and returns its mean loss. Posteriors that look
          at the data (sharpened ones) need it in training; the others ignore it. In eval mode
          without `nll`, and in training with `looking` off, they give a draw that has not looked.
        - `generator`: must be on the weights' device. Without it the draw comes from torch's own
          generator, and differs between the ranks of a process group.
        - `around`: where the look is taken: at the "draw", or at the "mean", without noise before
          the look.
        - `looks`: how many looks are taken, each where those before it have led; the average of
          their gradients counts. More than one is not in the paper.
        """
        # As in `forward`; asked first, so that a compiler reads no more than that.
        compiled = torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules
        draw = self._resample_untraced if compiled else self._resample
        draw(nll, generator, around, looks)

    def _resample(
        self,
        nll: Callable[[], Tensor] | None,
        generator: torch.Generator | None,
        around: Literal["draw", "mean"],
        looks: int,
    ) -> None:
        require((looks >= 1, "looks", f"must be at least 1, got {looks}"))
        looking = [b for b in self.each_block() if b.posterior.looks_at_data]
        if self.training and not self.looking:
            looking = []
        self._look, self._looked, self._ready = None, False, None
        if looking and nll is None and self.training:
            raise RuntimeError(
                f"a {looking[0].posterior.kind} posterior looks at the data: call "
                "model.resample(nll=lambda: loss of the batch) before the forward"
            )
        if looking and nll is not None and self._uses_mean():
            raise RuntimeError(
                f"a {looking[0].posterior.kind} posterior takes gradients at its draw: call "
                'resample(nll=...) in train mode or inside model.weights("sample")'
            )
        if generator is None:
            generator = rank_generator(next(self.each_block()).parameters_by_name["loc"].device)
        self.binding.place_weights()
        for mask in self._masks:
            mask.renew(generator)
        for block in self.each_block():
            with beside_if_late(block):
                block.resample(generator)
                if around == "mean" and block.noise:
                    block.noise["eps"].zero_()
        self._keep = self._drawn = True
        if looking and nll is not None:
            self._look_at_data(looking, nll, generator, looks)

    _resample_untraced = untraced(_resample)

    @untraced
    def prepare(self) -> None:
        """Make the weights of the next forward now: a KL asked for before it finds what it needs.

        If what they are made of changes before that forward, they are made again.
        """
        self.binding.place_weights()
        weights = self._weights()
        self._ready = self._made_of(), [block.noise for block in self.each_block()], weights
        self._keep = self._keep or not self._uses_mean()

    def _prepared(self) -> Mapping[Block, Tensors] | None:
        """The weights that `prepare` has made, if they are still those of this forward."""
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != self._made_of():
            return None
        self._keep = self._keep if self._uses_mean() else self._holding
        return ready[-1]

    def _made_of(self) -> object:
        """What the weights of a forward follow from, without a look at their values."""
        blocks = [
            (id(block.noise), block.placement, block.tuning, state_of(block.parameters_by_name))
            for block in self.each_block()
        ]
        return self._uses_mean(), torch.is_grad_enabled(), blocks

    @contextmanager
    def _masked(self) -> Iterator[None]:
        """Dropout masks are part of the draw: on with it, and held with it, for one forward."""
        held = self._holding or self._looked
        for mask in self._masks:
            mask.mode = "off" if self._uses_mean() else "held" if held else "auto"
        try:
            yield
        finally:
            for mask in self._masks:
                mask.mode = "auto"

    def _uses_mean(self) -> bool:
        return self._mode == "mean" or (self._mode == "auto" and not self.training)

    def _weights(self) -> Mapping[Block, Tensors]:
        """Each weight's theta for the coming forward."""
        if self._uses_mean():
            self._drawn = False
            return {block: lay(block, block.mean()) for block in self.each_block()}
        if not self._keep:
            self.resample()
        self._keep = self._holding
        self._drawn = True
        leaves = self._leaves
        found: dict[Block, Tensors] = {}
        for block in self.each_block():
            with beside_if_late(block):
                found[block] = leaves.get(block) or draw_of(block, self.hyper(block).prior)
        return found

    # --- looking at the data (sharpening) -------------------------------------------------------

    def _look_at_data(
        self,
        looking: Sequence[Block],
        nll: Callable[[], Tensor],
        generator: torch.Generator | None,
        looks: int,
    ) -> None:
        """Let those blocks see the gradient of the loss at the present draw (Algorithm 1)."""
        if self.second_order:
            check_repeatable(self.module)
            if looks > 1 and (self.training or torch.is_grad_enabled()):
                raise RuntimeError("the second order of sharpening goes through one look, not more")
        leaves: dict[Block, Tensors] = {}
        for block in looking:
            with beside_if_late(block):
                leaves[block] = leaves_of_draw(block)
        later: dict[Block, Tensors] = {}
        for block in looking:
            with self.beside():  # wanted after the look
                assert block.noise is not None
                later[block] = block.posterior.look_noise(block.noise, generator)
        factor = refine(self._gradients_at(leaves, nll)[0])
        for number in range(2, looks + 1):
            leaves = {block: leaves_of_draw(block) for block in looking}
            factor = refine(self._gradients_at(leaves, nll)[0], number)
        for block in looking:
            assert block.noise is not None
            block.noise = {n: block.kept(t) for n, t in {**later[block], **block.noise}.items()}
        self._keep = self._looked = True
        if self.second_order:
            noise = {block: block.noise for block in looking if block.noise is not None}
            self._look = Look(nll, factor, noise)

    def forget_draw(self) -> None:
        """Drop the present draw: the next forward draws anew, and there is no KL until then."""
        self._keep = self._drawn = self._looked = False
        self._look, self._ready = None, None

    def redraw_look(self, generator: torch.Generator | None = None) -> None:
        """Draw theta again for the present look: the same phi and the same step, with other noise
        around them. `evaluate_sharpened` weighs several such draws."""
        for block in self.each_block():
            if block.posterior.looks_at_data and block.noise is not None:
                drawn = block.posterior.look_noise(block.noise, generator)
                block.noise = {name: block.kept(tensor) for name, tensor in drawn.items()}

    def _gradients_at(
        self, leaves: Leaves, nll: Callable[[], Tensor], others: Sequence[Tensor] = ()
    ) -> tuple[Gradients, list[Tensor | None]]:
        """The loss's gradients, a tensor a weight, with these weights in the place of the draws;
        and those of what `others` are learnt."""
        inputs = [leaf for named in leaves.values() for leaf in named.values()]
        inputs = [*(leaf for leaf in inputs if leaf.requires_grad), *others]
        kept = self._keep
        with self.hold(), differentiable(self.module), torch.enable_grad():
            self._leaves, self._keep = leaves, True
            try:
                found = iter(torch.autograd.grad(nll(), inputs, allow_unused=True))
            except BaseException:
                self._keep = self._drawn = False
                raise
            finally:
                self._leaves = {}
        self._keep = kept
        self.join()
        gradients: dict[Block, list[Tensor | None]] = {}
        for block in leaves:
            gradients[block] = [next(found) for _ in block.layout.weights]
            keep_only(block, gradients[block])
        return gradients, list(found)

    @property
    def look(self) -> Look | None:
        """The last look at the data if the gradient is to go through it, otherwise None."""
        return self._look

    def bend(self, look: Look, local: float) -> None:
        """Add to the gradients what comes through a look at the batch (sharpening's second order).

        `local` is the weight of the KL that the batch is charged for its look.
        """
        self.join()
        look_too = {p for block in look.noise for p in block.parameters()}
        others = [p for p in self.parameters() if p.requires_grad and p not in look_too]
        bend(look, local, others, lambda leaves: self._gradients_at(leaves, look.nll, others))

    # --- the KL ---------------------------------------------------------------------------------

    @untraced
    def kl(self, estimator: Estimator = "auto") -> Tensor:
        """KL[q || p] in nats, summed over all drawn weights, at the last forward's draw.

        `estimator` is "auto" (exact for each block that has a closed form, otherwise from one
        sample), "exact" or "sample". Priors set to "fit" are first moved to their optimum for the
        present weights. Call it in train mode or inside `weights("sample")`, after a forward or
        `resample`: at the mean there is no draw, and it raises an error.
        """
        if self._mode == "mean" or not self._drawn:
            raise RuntimeError(
                "kl() speaks of the last forward's draw, and there is none: the mean was used, or "
                'nothing was run yet. Call it in train mode or inside model.weights("sample"), '
                "after a forward or model.resample()"
            )
        self.fit_priors()
        terms = [kl_of(block, self.hyper(block), estimator) for block in self.each_block()]
        return _total(terms)

    @untraced
    def local_kl(self) -> Tensor | None:
        """The KL charged in full for a look (Fortunato 2017, eq. 9); None if no posterior looks."""
        terms = [local_kl_of(b) for b in self.each_block() if b.posterior.looks_at_data]
        return _total(terms) if terms else None

    def local_log_ratio(self) -> Tensor | None:
        """log q(theta | phi, batch) - log p(theta | phi) at the present draw.

        Its expectation is `local_kl`; `evaluate_sharpened` weighs draws by it. None if no posterior
        looks.
        """
        terms = [local_log_ratio_of(b) for b in self.each_block() if b.posterior.looks_at_data]
        return _total(terms) if terms else None

    def fit_priors(self) -> None:
        """Move every prior parameter set to "fit" to its optimum (`kl` does this by itself)."""
        for index, hyper in enumerate(self.each_prior()):
            if not hyper.prior.named("fit"):
                continue
            moments = [
                moment
                for block in self.each_block()
                if block.prior == index
                for moment in block.left()
            ]
            hyper.fit([loc for loc, _ in moments], [scale for _, scale in moments])

    def charges(self) -> list[Charge]:
        """The terms of the last `kl()`, one per block."""
        return [block.last_charge for block in self.each_block() if block.last_charge is not None]

    @contextmanager
    def charged(
        self, charges: Sequence[Charge], weight: float | Tensor, local: float
    ) -> Iterator[None]:
        """Add the KL's gradient in the backward pass inside the block (`FreeEnergy` uses it).

        The KL of `charges` counts `weight` times, and what the batch is charged in full `local`
        times. The gradients of the loss and of the KL then take one pass over the weights together.
        """
        for block, charge in zip(self.each_block(), charges, strict=True):
            block.charge = replace(charge, weight=weight, local=local)
            if self._tuning.stream is not None and isinstance(weight, Tensor):
                block.held.append(weight)  # until `join`: the second stream reads it
        try:
            yield
            with self.beside():
                for block in self.each_block():
                    block.settle_charge()
        finally:
            for block in self.each_block():
                block.charge = None

    @contextmanager
    def one_sequence(self) -> Iterator[None]:
        """Take the backward pass inside as that of one sequence's loss (`FreeEnergy` uses it)."""
        for block in self.each_block():
            block.one_sequence = True
        try:
            yield
        finally:
            for block in self.each_block():
                block.one_sequence, block.of_sequence = False, {}

    # --- running faster -------------------------------------------------------------------------

    @contextmanager
    def tuned(
        self,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        stream: torch.cuda.Stream | None = None,
        aligned: bool = True,
    ) -> Iterator[None]:
        """Run faster inside the block, with the same maths.

        It is for modules that use their layers by calling them; one that reads a layer's weight
        itself gets an error that says so.

        - `dtype`: what the module computes in (bfloat16, say). What is learnt keeps its own dtype.
        - `compiled`: make each pass over the weights one kernel.
        - `stream`: a second stream, on which such passes run where nothing waits for them. Call
          `join` before you use the gradients.
        - `aligned`: lay the weights where tensor cores read them best. A CPU has none, and would
          then pass over whole weights instead of pieces that stay in its cache.
        """
        before = self._tuning
        for block in self.each_block():
            block.tuning = Tuning(aligned, dtype, compiled, stream)
        try:
            yield
        finally:
            for block in self.each_block():
                block.tuning, block.placement = before, None

    @property
    def _tuning(self) -> Tuning:
        """How it runs at present: all blocks alike."""
        return next(self.each_block()).tuning

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run inside the block on the second stream, if `tuned` was given one."""
        with beside(self._tuning.stream):
            yield

    def join(self) -> None:
        """Wait for the second stream, on the device."""
        stream = self._tuning.stream
        if stream is not None:
            here = torch.cuda.current_stream(stream.device)
            stream.wait_stream(here)  # part of a recording, even where nothing ran on it so far
            here.wait_stream(stream)
        for block in self.each_block():
            block.held.clear()

    # --- what there is --------------------------------------------------------------------------

    def moments(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The mean and standard deviation of each drawn weight, by name.

        The standard deviation of a point is None; both are 0 where a weight was pruned.
        """
        return {
            name: moment for block in self.each_block() for name, moment in block.moments().items()
        }

    @property
    def weight_count(self) -> int:
        """How many weights are drawn; tied ones count once, padding and pruned ones never."""
        return sum(block.count for block in self.each_block())

    @property
    def full_count(self) -> int:
        """How many weights are drawn, with the pruned ones."""
        return sum(block.layout.count for block in self.each_block())

    @property
    def all_points(self) -> bool:
        """Whether no weight has a spread: all posteriors are `Delta`."""
        return all(isinstance(block.posterior, Delta) for block in self.each_block())

    @property
    def draws_differ(self) -> bool:
        """Whether draws differ: some weight has a spread, or a mask is drawn at test, too."""
        masked = any(mask.rate > 0 and mask.at_test for mask in self._masks)
        return masked or not self.all_points

    @property
    def has_description_length(self) -> bool:
        """Whether the KL is known in nats, not only up to a constant (Delta, Uniform)."""
        return all(
            block.posterior.proper and self.hyper(block).prior.proper for block in self.each_block()
        )

    @property
    def looks_at_data(self) -> bool:
        """Whether some posterior looks at the data (sharpening)."""
        return any(block.posterior.looks_at_data for block in self.each_block())

    @property
    def per_sequence(self) -> bool:
        """Whether some posterior needs the gradients of single sequences (Fisher estimate)."""
        return any(block.posterior.per_sequence for block in self.each_block())

    @property
    def second_order(self) -> bool:
        """Whether some posterior's gradient goes through its look at the data."""
        return any(block.posterior.second_order for block in self.each_block())

    def hyper(self, block: Block) -> Hyper:
        """The prior of a block, with its present values."""
        hyper = self.priors[block.prior]
        assert isinstance(hyper, Hyper)
        return hyper

    def each_block(self) -> Iterator[Block]:
        """The blocks: weights of one layer that share a posterior and a prior."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def each_prior(self) -> Iterator[Hyper]:
        """The prior objects, with their present values."""
        for hyper in self.priors:
            assert isinstance(hyper, Hyper)
            yield hyper

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "nn.DataParallel runs copies of a model that it forgets, with their draws and the KL: "
            "use DistributedDataParallel"
        )

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: without what belongs to a batch, a graph or a `with` block. (Its next forward
        has the draw that was held.)"""
        apart = {"_look": None, "_ready": None, "_mode": "auto", "_holding": False}
        return {**super().__getstate__(), **apart}


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Where a compiler comes in; it does not of its own accord where a module is one of torch's."""
    return module(*args, **kwargs)


@untraced
def _enter(context: AbstractContextManager[None]) -> None:
    context.__enter__()


@untraced
def _leave(context: AbstractContextManager[None]) -> None:
    context.__exit__(None, None, None)


def _total(terms: Sequence[Tensor]) -> Tensor:
    """Of blocks that may be on several devices, on the first one's."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def uncompiled(model: T) -> T:
    """What `torch.compile(model)` was made of, which it passes everything on to."""
    original: T = getattr(model, "_orig_mod", model)
    return original


def check_bayesian(model: object) -> None:
    """Plain modules are easily taken for what `bayesianize` makes of them."""
    given = uncompiled(model)
    if not isinstance(given, Bayesian):
        raise TypeError(f"expected a model made by bayesianize, got {type(given).__name__}")
