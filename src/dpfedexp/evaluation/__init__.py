"""What the server measures of a released model on a test set of its own (docs/losses.md)."""

from dpfedexp.evaluation.evaluate import Evaluate, on_test_set
from dpfedexp.evaluation.measures import Metric, auc, check_metrics

__all__ = ["Evaluate", "Metric", "auc", "check_metrics", "on_test_set"]
