"""An endpoint of the stand-in that is used after its close: `shut.py FOLDER`, which has the module `shut_endpoint`."""

from __future__ import annotations

import errno
import sys

sys.path.insert(0, sys.argv[1])

import shut_endpoint

from aiote.rails.library import load
from aiote_native.libfabric.device import LibfabricDevice
from aiote_native.libfabric.endpoint import LibfabricEndpoint

load()
device = LibfabricDevice("efa")
endpoint = LibfabricEndpoint(device)
assert shut_endpoint.after_shut(endpoint) == [-errno.ENOTCONN, -errno.ENOTCONN, 0]
endpoint.close()
device.close()
