"""Sinks of the log. A new one is a class with the methods of `Sink`; the config names it by `_target_`."""

from safe_trainer.loggers.csv_file import Csv
from safe_trainer.loggers.json_lines import JsonLines
from safe_trainer.loggers.sink import Sink
from safe_trainer.loggers.tensorboard import TensorBoard

__all__ = ["Csv", "JsonLines", "Sink", "TensorBoard"]
