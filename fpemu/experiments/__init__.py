"""What low precision costs a small network: strategies, data, training and their comparison."""

from .ablate import ablate
from .data import Data, load_data
from .result import Result
from .settings import Settings
from .strategies import STRATEGIES, Strategy, load_strategies
from .train import train

__all__ = [
    "STRATEGIES",
    "Data",
    "Result",
    "Settings",
    "Strategy",
    "ablate",
    "load_data",
    "load_strategies",
    "train",
]
