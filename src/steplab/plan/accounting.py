"""Derives by formula the memory, the devices and the batch that hides communication, for training at scale.

Source: "How to Scale Your Model" (Austin et al. 2025, Google DeepMind), part 5. Batches are in tokens. Times are
the forward pass's; the backward pass has twice the products and twice the bytes. Communication is bytes over bandwidth,
without latency. Times leave out attention's scores, norms, embeddings and the head; memory counts all parameters.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from steplab.costs.rates import LEAST_PER_S
from steplab.errors import UserError
from steplab.plan.formulas import Formula, root, symbol
from steplab.plan.model_sizes import Sizes
from steplab.records.accounting import Accounting, Figure, Means, Notation, Question
from steplab.specs.hardware import HardwareSpec, network_of
from steplab.specs.layout import Layout
from steplab.units import GIB, counted, format_message, three_digits

BOOK = "How to Scale Your Model (Austin et al. 2025), part 5"
_COMBINED = f"{BOOK}, “Combining FSDP and Tensor Parallelism”, https://jax-ml.github.io/scaling-book/training"
_ZERO = "Rajbhandari et al. 2020, “ZeRO”, sections 3.1 and 5, arXiv:1910.02054"
_SAVED = "Korthikanti et al. 2022, “Reducing Activation Recomputation”, section 4.1, arXiv:2205.05198"
_PIPELINE = "Narayanan et al. 2021, “Efficient Large-Scale Language Model Training”, section 2.2, arXiv:2104.04473"
_GB = 1e9
_OF_A_TORUS = "over both links of an axis of its torus"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    name: str
    memory_bytes: float
    """Stated capacity, with GB = 1e9."""
    flops_per_s: float
    """Peak of bf16 matmuls."""
    axis_bytes_per_s: float
    """Bytes received per second along one axis of the network."""
    own_links: bool
    """True if each axis of the device mesh has its own links, so that FSDP's and TP's communication overlap."""
    link: str
    gpus_per_node: int | None = None
    """Number of devices that these links connect; None: every device of the mesh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    fsdp: int
    """X: number of FSDP shards of the weights and of the batch."""
    tp: int
    """Y: number of tensor-parallel shards of each matrix."""
    fsdp_axes: int
    """M_X: number of network axes that FSDP uses."""
    tp_axes: int
    """M_Y: number of network axes that tensor parallelism uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    symbol: Formula
    figure: Figure
    """The symbol's value, with the formula and the figures that it is computed from."""


def device_of(card: HardwareSpec, *, flops_per_s: float | None = None, axis_bytes_per_s: float | None = None) -> Device:
    """Figures of a known card, replaced by those that are given.

    `axis_bytes_per_s` is one direction of one link. Each axis of a torus has its own; a GPU's axes share one, because a
    switch limits what it receives. Raises UserError for a card without a stated bf16 peak.
    """
    for option, value, example in (("--flops", flops_per_s, "459e12"), ("--bandwidth", axis_bytes_per_s, "180e9")):
        if value is not None and value < LEAST_PER_S:
            unit = "FLOP/s" if option == "--flops" else "bytes per second"
            raise UserError(f"{option} is in {unit}; type {option} {example}, not {value:g}")
    peak = card.peak_flops("bf16")
    if peak is None and flops_per_s is None:
        raise UserError(f"{card.name} has no stated bf16 peak; give one with --flops")
    own_links, given = card.axis_bytes_per_s is not None, axis_bytes_per_s is not None
    network = network_of(card.name)
    return Device(
        name=card.name,
        memory_bytes=card.memory_bytes / GIB * _GB,
        flops_per_s=flops_per_s or (peak.flops_per_s if peak else 0.0),
        axis_bytes_per_s=axis_bytes_per_s or card.axis_bytes_per_s or card.interconnect_bytes_per_s / 2,
        own_links=own_links,
        link="as given" if given else _OF_A_TORUS if own_links else "in one direction of its link",
        gpus_per_node=None if own_links or given else network.gpus_per_node if network else 8,
    )


def account(sizes: Sizes, *, model: str, tokens: int, mesh: Mesh, device: Device, counted: Device) -> Accounting:
    """Derive all figures for training a model on a mesh, each with its formula and source.

    Args:
        tokens: batch for which saved activations are counted.
        device: the kind of device in `mesh`.
        counted: the card whose memory capacity the fp32 training state is divided by.
    """
    facts = _Facts(sizes, tokens, mesh, device, counted)
    return Accounting(model=model, given=tuple(facts.given), questions=tuple(facts.questions()))


def mesh_of(device: Device, sizes: Layout, axes: Layout | None) -> Mesh:
    """Mesh of a layout with axes fsdp and tp.

    axes: number of network axes for fsdp and for tp; None: two and one on a torus. Raises UserError for other axes, for
    fsdp=1, which gathers no weights, and for several network axes of a GPU.
    """
    for layout in (sizes, axes or sizes):
        if layout.world_size != layout.fsdp * layout.tp:
            raise UserError(f"a mesh has fsdp and tp alone, as in fsdp=16,tp=4, not {layout}")
    if sizes.fsdp == 1:
        raise UserError(f"--mesh {sizes} gathers no weights; give fsdp at least 2, as in fsdp=16,tp=4")
    if axes is not None and not device.own_links and axes.world_size != 1:
        raise UserError(f"{device.name} has one link for all axes of a mesh; leave --axes out")
    taken = axes or Layout(fsdp=2 if device.own_links else 1)
    return Mesh(fsdp=sizes.fsdp, tp=sizes.tp, fsdp_axes=taken.fsdp, tp_axes=taken.tp)


class _Facts:
    def __init__(self, sizes: Sizes, tokens: int, mesh: Mesh, device: Device, counted: Device) -> None:
        self.sizes, self.mesh, self.device, self.counted = sizes, mesh, device, counted
        self.num_parts = 2 if sizes.key_width else 1
        self.given = list[Figure]()
        given = self._given
        self.D = given("D", sizes.width, "", "width of the residual stream")
        self.F = given("F", sizes.inner, "", "inner width of the feed-forward blocks")
        self.L = given("L", sizes.num_layers, "", "blocks")
        self.E = self.Ea = given("E", sizes.matrices, "", f"elements of a block's matrices: {sizes.kinds}")
        self.k = symbol("k", 1)
        if sizes.experts:  # all experts' weights are gathered; a token is multiplied by some
            number, chosen = sizes.experts
            multiplied = sizes.matrices - (sizes.num_parameters - sizes.num_active) / sizes.num_layers
            rows = f"experts that a token takes of {number}: {chosen} rows a token are multiplied"
            self.Ea = given("E_a", multiplied, "", "elements of E that multiply a token: of its own experts alone")
            self.k = given("k", chosen, "", rows)
            given("P_a", sizes.num_active, "", "parameters that one token uses")
        self.P = given("P", sizes.num_parameters, "", "parameters, all of them")
        self.X = given("X", mesh.fsdp, "devices", "that shard the weights and split the batch (FSDP)")
        self.Y = given("Y", mesh.tp, "devices", "that split each matrix (tensor parallelism)")
        self.MX = given("M_X", mesh.fsdp_axes, "", "axes of the network for X")
        self.MY = given("M_Y", mesh.tp_axes, "", "axes of the network for Y")
        self.C = given("C", device.flops_per_s, "FLOP/s", f"peak of {device.name} in bf16")
        self.W = given("W", device.axis_bytes_per_s, "bytes/s", f"that {device.name} receives, {self._link()}")
        self.N, self.tokens = symbol("N", mesh.fsdp * mesh.tp), symbol("B", tokens)
        self.alpha = symbol("α", device.flops_per_s / device.axis_bytes_per_s)
        # The book's F, for blocks of other matrices than two of D x F.
        self.is_plain = sizes.matrices == 2 * self.num_parts * sizes.width * sizes.inner
        self.Fe = self.F if self.is_plain else symbol("F_e", self.Ea.value / (2 * self.num_parts * sizes.width))

    def _given(self, name: str, value: float, unit: str, what: str) -> Formula:
        found = symbol(name, value)
        self.given.append(Figure(symbol=_notation(found), value=value, unit=unit, what=what))
        return found

    def _link(self) -> str:
        node = self.device.gpus_per_node
        return f"{self.device.link}, within a node of {node}" if self._spans_nodes else self.device.link

    @property
    def _spans_nodes(self) -> bool:
        node = self.device.gpus_per_node
        return node is not None and self.mesh.fsdp * self.mesh.tp > node

    def _too_fast(self) -> str:
        if not self._spans_nodes:
            return ""
        return (
            f" That counts the link within a node of {self.device.gpus_per_node}, and this mesh spans several: give "
            "a GPU's network rate by --bandwidth, such as 50e9 for 400 Gb/s."
        )

    def questions(self) -> Iterator[Question]:
        yield self._state()
        yield self._activations()
        yield self._sharded()
        yield self._least_batch()
        yield self._best_split()
        if self.sizes.experts:
            yield self._expert_parallel(self.sizes.experts[0])
        yield self._what_else()

    # --- memory ---------------------------------------------------------------------------------------------

    def _state(self) -> Question:
        P, lines = self.P, list[Line]()
        if self.sizes.plain_layers:
            lines.append(_line("P", self.sizes.plain_layers * self.L * self.D * self.F, "", "parameters"))
        weights = _line("S_w", 4 * P, "bytes", "master weights, fp32")
        gradients = _line("S_g", 4 * P, "bytes", "accumulated gradients, fp32")
        moments = _line("S_o", 8 * P, "bytes", "both moments of AdamW, fp32")
        total = weights.symbol + gradients.symbol + moments.symbol
        whole = _line("S", total, "bytes", "all three")
        capacity = symbol("H", self.counted.memory_bytes)
        count = _line("n", whole.symbol / capacity, "devices", f"in memories of {format_message(capacity.value)}")
        number, size = math.ceil(count.symbol.value), format_message(capacity.value)
        return Question(
            title="How much memory do weights, gradients and optimizer state take?",
            answer=f"Master weights, accumulated gradients and optimizer state in fp32 take "
            f"{format_message(whole.symbol.value)}, the memory of {counted(number, 'GPU')} of {size} "
            f"({self.counted.name}).",
            figures=_figures(*lines, weights, gradients, moments, whole, count),
            source=_ZERO,
        )

    def _saved(self) -> tuple[Line, Line]:
        """Bytes saved for backward, per token and for the batch: inputs of matmuls and of fused attention, once each,
        in bf16."""
        per_block: Formula = self.D + self.F
        if self.sizes.key_width:
            per_block = 4 * self.D + 2 * symbol("K", self.sizes.key_width) + self.F
        if self.sizes.experts:
            per_block = 4 * self.D + 2 * symbol("K", self.sizes.key_width) + self.k * (self.D + self.F)
        per_token = _line("a", 2 * self.L * per_block, "bytes", "saved for a token")
        return per_token, _line("A", self.tokens * per_token.symbol, "bytes", "saved for the batch")

    def _activations(self) -> Question:
        per_token, whole = self._saved()
        rule = "each linear layer saves its input in bf16, once where several layers read it"
        if self.sizes.key_width:
            rule += "; fused attention saves queries, keys (K wide), values and its output"
        return Question(
            title="How much is saved for the backward pass?",
            answer=f"Saved activations take {format_message(per_token.symbol.value)} a token in bf16, so "
            f"{format_message(whole.symbol.value)} for a batch of {int(self.tokens.value):,} tokens.",
            figures=_figures(per_token, whole),
            source=_SAVED,
            remarks=(
                f"The rule: {rule}. The rest (norms, activation functions, the residual stream) is "
                "assumed to be recomputed. `steplab plan memory` counts the memory that torch keeps.",
            ),
        )

    def _sharded(self) -> Question:
        state, activations = symbol("S", 16 * self.P.value), self._saved()[-1].symbol
        capacity = symbol("H", self.device.memory_bytes)
        room, shared = capacity.value - activations.value / 2, state.value + activations.value / 2
        title = "How many shards until a device has room?"
        expression = "M(N) = (S + A / 2) / N + A / 2"
        if room <= 0:
            return Question(
                title=title,
                answer=f"No number of shards is enough: the half of the activations that is not sharded takes "
                f"{format_message(activations.value / 2)}, and {self.device.name} has "
                f"{format_message(capacity.value)}; take a smaller --batch or --context.",
                figures=(),
                source=_ZERO,
            )
        least = math.floor(shared / room) + 1
        N = symbol("N", least)
        bound = _line("N_min", (state + activations / 2) / (capacity - activations / 2), "devices", "by M(N) < H")
        memory = _line("M", (state + activations / 2) / N + activations / 2, "bytes", f"on each of {least:,} devices")
        without = math.floor(state.value / capacity.value) + 1
        return Question(
            title=title,
            answer=f"Weights, gradients and optimizer state take S = {format_message(state.value)}, activations "
            f"A = {format_message(activations.value)} for a batch of {int(self.tokens.value):,} tokens. Sharding S "
            f"and (assumed) half of A, a device holds {expression}: less than the {format_message(capacity.value)} of "
            f"{self.device.name} from N = {least:,} on.",
            figures=_figures(bound, memory),
            source=_ZERO,
            remarks=(f"Without activations N = {without:,} is enough.",),
        )

    # --- communication ----------------------------------------------------------------------------------------

    def _least_batch(self) -> Question:
        X, Y, MX, MY, N, Fe = self.X, self.Y, self.MX, self.MY, self.N, self.Fe
        title = "From which batch on is the forward pass compute-bound?"
        alpha = _line("α", self.C / self.W, "", "FLOPs for each byte that is received")
        width = _line("F_e", self.Ea / (2 * self.num_parts * self.D), "", "elements of E for each number that Y moves")
        most = _line("Y_max", MY * Fe / self.alpha, "devices", "from which on tensor parallelism alone costs more")
        shared = (alpha, *(() if self.is_plain else (width,)), most)
        if not self._tp_fits:
            return Question(
                title=title,
                answer=f"No batch is large enough: tensor parallelism over {self.mesh.tp} devices takes longer than "
                f"the products that it splits; it is hidden below Y = {three_digits(most.symbol.value)}.",
                figures=_figures(*shared),
                source=_COMBINED,
            )
        overlapping, apart, overall = self._least_tokens()
        per_device = overlapping if self.device.own_links else apart
        batch = overall.symbol
        moved: Formula = 4 * self.num_parts * batch * self.D / (X * self.W * MY)
        times = [
            _line("T_math", 2 * self.Ea * batch / (N * self.C), "s", "a block's products on a device, at that batch"),
            _line("T_FSDP", 2 * self.E / (Y * self.W * MX), "s", "gathering a block's weights, two bytes each"),
        ]
        bounds = [overlapping]
        if self.mesh.tp > 1:
            times.append(_line("T_TP", moved, "s", "gathering and scattering activations, two bytes each"))
            bounds.append(apart)
        other = self._if_not(apart)
        return Question(
            title=title,
            answer=f"On {self.device.name}, on a mesh of X = {self.mesh.fsdp} (FSDP) × Y = {self.mesh.tp} (TP), the "
            f"forward pass is compute-bound from {_tokens(per_device.symbol.value)} tokens a device on, an overall "
            f"batch of {round(batch.value):,} tokens; {other}.{self._too_fast()}",
            figures=_figures(*shared, *bounds, overall, *times),
            source=_COMBINED,
            remarks=(
                "Compute-bound means max(T_FSDP, T_TP) < T_math where each axis of the mesh has its own links, and "
                "T_FSDP + T_TP < T_math where they share one. The backward pass has twice the products and twice the "
                "bytes.",
            ),
        )

    def _least_tokens(self) -> tuple[Line, Line, Line]:
        Y, MX, MY, Fe = self.Y, self.MX, self.MY, self.Fe
        gathered = self._more(self.alpha)
        overlapping = _line("b", gathered / (MX * Y), "tokens", "a device, if both communications overlap")
        if self.mesh.tp == 1:
            alone = _line("b", gathered / MX, "tokens", "a device, whose weights alone are communicated")
            return alone, alone, _line("B", self.N * alone.symbol, "tokens", "the overall batch")
        apart = _line(
            "b_sum", gathered * Fe * MY / (MX * Y * (MY * Fe - self.alpha * Y)), "tokens", "a device, if they do not"
        )
        per_device = overlapping if self.device.own_links else apart
        return overlapping, apart, _line("B", self.N * per_device.symbol, "tokens", "the overall batch")

    def _more(self, formula: Formula) -> Formula:
        return formula * self.E / self.Ea if self.sizes.experts else formula

    def _if_not(self, apart: Line) -> str:
        if self.mesh.tp == 1:
            return "weights alone are communicated"
        if not self.device.own_links:
            return "the two communications share one link and do not overlap"
        tokens = apart.symbol.value
        return f"if FSDP and TP did not overlap, {_tokens(tokens)} and {round(tokens * self.N.value):,}"

    @property
    def _tp_fits(self) -> bool:
        return self.mesh.tp == 1 or self.alpha.value * self.mesh.tp < self.mesh.tp_axes * self.Fe.value

    def _best_split(self) -> Question:
        MX, MY, Fe, N = self.MX, self.MY, self.Fe, self.N
        batch = self._least_tokens()[-1].symbol if self._tp_fits else self.tokens
        X = _line(
            "X_opt", root(batch * MX * N / (self._more(Fe) * MY)), "devices", "where T_FSDP = T_TP, which is least"
        )
        Y = _line("Y_opt", N / X.symbol, "devices", "the others")
        squared = self._more(self.alpha**2)
        if not self.device.own_links:  # the sum of two equal times is twice each, and enters squared
            squared = 4 * squared
        floor = _line("b_min", squared / (MX * MY * Fe), "tokens", "a device, at the best split of any N")
        most = _line("N_max", batch * MX * MY * Fe / squared, "devices", "which this batch keeps compute-bound")
        fsdp, tp = self._best_whole_split(batch.value)
        return Question(
            title="Which split is best, and how large may N become?",
            answer=f"For a batch of {round(batch.value):,} tokens the best split of {self.mesh.fsdp * self.mesh.tp} "
            f"devices is X = {three_digits(X.symbol.value)}, Y = {three_digits(Y.symbol.value)} (in whole numbers "
            f"{fsdp} × {tp}), and N may grow to {math.floor(most.symbol.value):,} before communication bounds it.",
            figures=_figures(X, Y, floor, most),
            source=_COMBINED,
        )

    def _splits(self) -> list[tuple[int, int]]:
        number = self.mesh.fsdp * self.mesh.tp
        return [(x, number // x) for x in range(1, number + 1) if number % x == 0]

    def _best_whole_split(self, batch: float) -> tuple[int, int]:
        def taken(split: tuple[int, int]) -> float:
            fsdp, tp = split
            weights = self._more(self.Fe).value / (tp * self.mesh.fsdp_axes) if fsdp > 1 else 0.0
            activations = batch / (fsdp * self.mesh.tp_axes) if tp > 1 else 0.0
            return max(weights, activations) if self.device.own_links else weights + activations

        return min(self._splits(), key=taken)

    def _needed(self, tp: int, weight_bytes: int = 2) -> float:
        alpha, MX, MY, Fe = self.alpha.value, self.mesh.fsdp_axes, self.mesh.tp_axes, self.Fe.value
        if tp > 1 and alpha * tp >= MY * Fe:
            return math.inf
        gathered = self._more(self.alpha).value * weight_bytes / 2 / (MX * tp)
        return gathered if self.device.own_links or tp == 1 else gathered / (1 - alpha * tp / (MY * Fe))

    def _expert_parallel(self, number: int) -> Question:
        ranks = max(x for x, _ in self._splits() if number % x == 0)
        N_e = symbol("N_e", ranks)
        rows = _line("R", self.k * self.tokens / self.N, "tokens", "rows that the experts of a device multiply")
        sent = _line("T_EP", 4 * self.D * rows.symbol * (N_e - 1) / (N_e * self.W), "s", "to the experts and back")
        products = _line("T_rows", 6 * self.D * self.F * rows.symbol / self.C, "s", "three products of these rows")
        ratio = sent.symbol.value / products.symbol.value
        return Question(
            title="What does expert parallelism send?",
            answer=f"With {number} experts over {ranks} devices, {number // ranks} on each, every token travels to its "
            f"{self.k.value:.0f} experts and back, which takes {three_digits(ratio)} times as long as their products, "
            "at any batch; no device gathers experts.",
            figures=_figures(rows, sent, products),
            source=BOOK,
            remarks=(
                "Balance is an assumption: every expert gets as many rows. If the busiest device gets f times as many, "
                "both times are f times as long, and the others wait.",
            ),
        )

    def _what_else(self) -> Question:
        fsdp, tp = self.mesh.fsdp, self.mesh.tp
        here = self._needed(tp)
        splits = [split for split in self._splits() if split[0] > 1]
        best = min(splits, key=lambda split: self._needed(split[1]), default=(fsdp, tp))
        means = [Means(what="the mesh as it is", how=f"X = {fsdp}, Y = {tp}", tokens_per_device=here)]
        if best != (fsdp, tp):
            how = f"X = {best[0]}, Y = {best[1]}: the split of these devices that needs the smallest batch"
            means.append(Means(what="another split", how=how, tokens_per_device=self._needed(best[1])))
        means += [
            Means(
                what="weights of one byte on the wire",
                how="fp8 or int8: for the gather alone, with products in bf16, so that T_FSDP halves",
                tokens_per_device=self._needed(tp, weight_bytes=1),
            ),
            Means(
                what="a pipeline of two stages",
                how="b / p: a stage of p gathers its weights once for all m microbatches; its bubble is (p - 1) / m",
                tokens_per_device=here / 2,
            ),
        ]
        possible = [option for option in means if math.isfinite(option.tokens_per_device)]
        least = min(possible, key=lambda option: option.tokens_per_device, default=None)
        answer = "Nothing listed here makes this mesh compute-bound."
        if least is not None:
            came = f" from {_tokens(here)}" if math.isfinite(here) else ""
            others = [each for each in possible if each is not least and each.tokens_per_device < here]
            told = ", ".join(f"{each.what} to {_tokens(each.tokens_per_device)}" for each in others)
            answer = (
                f"The largest gain is from {least.what} ({least.how.partition(':')[0]}): it lowers "
                f"the batch a device{came} to {_tokens(least.tokens_per_device)} tokens{told and f'; {told}'}."
            )
        return Question(
            title="What else lowers the batch a device without losing throughput?",
            answer=answer,
            figures=(),
            source=f"{_COMBINED}; of the pipeline {_PIPELINE}",
            means=tuple(possible),
            remarks=(
                "More axes of the network for the weights (M_X) lower it in proportion. Context parallelism lowers the "
                "number of sequences, not of tokens: a batch is counted in tokens here, and a sequence may be spread.",
                "Micro-steps do not lower it: each gathers the weights again, unless they stay gathered "
                "(--reshard-after-forward never), for which a device needs room for all of them.",
            ),
        )


def _notation(formula: Formula) -> Notation:
    return Notation(text=formula.text(), latex=formula.latex())


def _figures(*lines: Line) -> tuple[Figure, ...]:
    return tuple(line.figure for line in lines)


def _tokens(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else three_digits(count)


def _line(name: str, formula: Formula, unit: str, what: str) -> Line:
    """unit: bytes, tokens, devices, s, or '' for a ratio."""
    found = symbol(name, formula.value)
    figure = Figure(
        symbol=_notation(found),
        formula=_notation(formula),
        in_figures=Notation(text=formula.text(figures=True), latex=formula.latex(figures=True)),
        value=found.value,
        unit=unit,
        what=what,
    )
    return Line(symbol=found, figure=figure)
