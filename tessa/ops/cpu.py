"""CPU ops for TESSA's slots: library matrix products over all adapters at once, no loop over adapters in Python.

`segmented_*` group the step's tokens by slot and compute each token's own slice (one compiled kernel where
`tessa.ops.compiled` applies, else one grouped product). `wide_*`
compute every resident slot for every token beside the base product, in one product over ``[W | D_1 ... D_S]`` or
``[W; D_1 ... D_S]``; each token's own results are then routed. Shapes are those of `tessa.ops.slots`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm

from tessa.ops import compiled
from tessa.ops.routing import Routing
from tessa.ops.slots import SlotPart


def gather_columns(x: torch.Tensor, part: SlotPart, routing: Routing) -> torch.Tensor:
    """Each adapted token's slice of its input, ``[n, used]`` in slot order; padded positions read column 0."""
    if part.window is not None:
        return routing.gather(x[:, part.window[0] : part.window[1]])
    columns = part.index[:, : part.used].index_select(0, routing.slots)
    return routing.gather(x).gather(1, columns)


def scatter_columns(y: torch.Tensor, part: SlotPart, routing: Routing, update: torch.Tensor) -> None:
    """Add ``update [n, used]`` at each token's slice of its output; padded positions add zero to column 0."""
    if part.window is not None:
        routing.add_rows(y[:, part.window[0] : part.window[1]], update)
        return
    columns = part.index[:, : part.used].index_select(0, routing.slots)
    rows = routing.order.unsqueeze(1).expand_as(columns)
    y.index_put_((rows, columns), update, accumulate=True)


def segmented_in(y: torch.Tensor, x: torch.Tensor, part: SlotPart, routing: Routing) -> None:
    """``y[t] += delta[s]^T x[t, index[s]]`` in place; x ``[T, d_in]``, y ``[T, d_out]``."""
    if compiled.usable(routing.rows, part.widest, x, y, part.delta):
        compiled.segmented_in(y, x, part, routing)
        return
    sliced = gather_columns(x, part, routing)
    if len(routing.groups) == 1:
        update = torch.mm(sliced, part.delta[routing.groups[0], : part.used])
    else:
        update = grouped_mm(sliced, part.delta[:, : part.used], offs=routing.ends)
    routing.add_rows(y, update)


def segmented_out(y: torch.Tensor, x: torch.Tensor, part: SlotPart, routing: Routing) -> None:
    """``y[t, index[s]] += delta[s] x[t]`` in place."""
    if compiled.usable(routing.rows, part.widest, x, y, part.delta):
        compiled.segmented_out(y, x, part, routing)
        return
    rows = routing.gather(x)
    if len(routing.groups) == 1:
        update = torch.mm(rows, part.delta[routing.groups[0], : part.used].t())
    else:
        update = grouped_mm(rows, part.delta[:, : part.used].transpose(1, 2), offs=routing.ends)
    scatter_columns(y, part, routing, update)


def widen_input(x: torch.Tensor, part: SlotPart, routing: Routing) -> torch.Tensor:
    """``[x | scattered slices]``, shape ``[T, d_in + S * used]``: each token's slice in its own slot's block."""
    tokens, d_in = x.shape
    wide = x.new_zeros(tokens, d_in + part.num_slots * part.used)
    wide[:, :d_in] = x
    blocks = wide[:, d_in:].unflatten(1, (part.num_slots, part.used))
    blocks[routing.order, routing.slots] = gather_columns(x, part, routing)
    return wide


def wide_weight_in(weight: torch.Tensor, part: SlotPart) -> torch.Tensor:
    """``[W | D_1 | ... | D_S]``, shape ``[d_out, d_in + S * used]``."""
    return torch.cat([weight, part.delta[:, : part.used].flatten(0, 1).t()], dim=1)


def wide_weight_out(weight: torch.Tensor, part: SlotPart) -> torch.Tensor:
    """``[W; D_1; ...; D_S]``, shape ``[d_out + S * used, d_in]``."""
    return torch.cat([weight, part.delta[:, : part.used].flatten(0, 1)], dim=0)


def narrow_output(wide: torch.Tensor, d_out: int, part: SlotPart, routing: Routing) -> torch.Tensor:
    """``y [T, d_out]`` from the wide product's ``[T, d_out + S * used]``: each token's own slot added at its slice."""
    y = wide[:, :d_out].contiguous()
    blocks = wide[:, d_out:].unflatten(1, (part.num_slots, part.used))
    scatter_columns(y, part, routing, blocks[routing.order, routing.slots])
    return y
