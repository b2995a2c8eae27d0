from collections.abc import Callable

class OwnLoop:
    def __init__(self, running: Callable[[], object], loop: object) -> None: ...
