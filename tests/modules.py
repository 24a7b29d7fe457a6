"""Modules that several tests save and load."""

from torch import nn


class Remembers(nn.Module):
    """Has extra state of any kind."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        self.value = state
