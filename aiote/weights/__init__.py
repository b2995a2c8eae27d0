"""Updates of model weights in running inference ranks, straight out of the ranks that train them.

`Layout` says which rank holds which part of which tensor, on either side; `Recipe` what each target tensor is made of;
`plan_update` computes from these what every source rank reads, makes and writes, once for all updates.
"""

from .copies import Copy
from .deal import Unit
from .layout import Buffer, Layout, Tensor
from .placement import Mesh, Replicate, Runs, Shard, StridedShard, packed, slots
from .plan import Traffic, UpdatePlan, plan_update
from .recipe import Expression, Quantized, Recipe, cat, quantized, source, stack
from .tasks import Read, Task, Write

__all__ = [
    "Buffer",
    "Copy",
    "Expression",
    "Layout",
    "Mesh",
    "Quantized",
    "Read",
    "Recipe",
    "Replicate",
    "Runs",
    "Shard",
    "StridedShard",
    "Task",
    "Tensor",
    "Traffic",
    "Unit",
    "UpdatePlan",
    "Write",
    "cat",
    "packed",
    "plan_update",
    "quantized",
    "slots",
    "source",
    "stack",
]
