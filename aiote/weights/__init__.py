"""Weight updates: training ranks write new weights straight into the memory of running inference ranks.

A `Layout` names the ranks that hold each part of each tensor. A `Recipe` says how each target tensor is made from
source tensors. `plan_update` computes from them what every source rank reads, makes and writes; one plan serves all
updates. It must not know frameworks for training or inference, nor the other services.
"""

from .assignment import Unit
from .controller import Controller, UpdateError, UpdateReport
from .copies import Copy
from .layout import Layout, Tensor, TensorBuffer
from .placement import Mesh, Replicate, Runs, Shard, StridedShard, packed, slots
from .plan import Traffic, UpdatePlan, plan_update
from .protocol import PlanMismatchError, StaleUpdateError, Update
from .recipe import Expression, Quantized, Recipe, cat, quantized, source, stack
from .record import Recording, record
from .source import Source, serve_source
from .target import Target, serve_target
from .tasks import Read, Task, Write

__all__ = [
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
    "TensorBuffer",
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
