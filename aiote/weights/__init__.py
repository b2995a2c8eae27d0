"""Updates of model weights in running inference ranks, straight out of the ranks that train them.

`Layout` says which rank holds which part of which tensor, on either side; `Recipe` what each target tensor is made of;
`plan_update` computes from these what every source rank reads, makes and writes, once for all updates.
"""

from .controller import Controller, UpdateError, UpdateReport
from .copies import Copy
from .deal import Unit
from .layout import Buffer, Layout, Tensor
from .placement import Mesh, Replicate, Runs, Shard, StridedShard, packed, slots
from .plan import Traffic, UpdatePlan, plan_update
from .protocol import PlanMismatchError, StaleUpdateError, Update
from .recipe import Expression, Quantized, Recipe, cat, quantized, source, stack
from .record import Recording, record
from .source import Source, serve_source
from .target import Target, serve_target
from .tasks import Read, Task, Write

__all__ = [
    "Buffer",
    "Controller",
    "Copy",
    "Expression",
    "Layout",
    "Mesh",
    "PlanMismatchError",
    "Quantized",
    "Read",
    "Recipe",
    "Recording",
    "Replicate",
    "Runs",
    "Shard",
    "Source",
    "StaleUpdateError",
    "StridedShard",
    "Target",
    "Task",
    "Tensor",
    "Traffic",
    "Unit",
    "Update",
    "UpdateError",
    "UpdatePlan",
    "UpdateReport",
    "Write",
    "cat",
    "packed",
    "plan_update",
    "quantized",
    "record",
    "serve_source",
    "serve_target",
    "slots",
    "source",
    "stack",
]
