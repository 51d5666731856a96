"""Registry of the tasks other than translation; importing it needs no torch.

To add a task: a subclass of `TrainingTask` (`non_translation_task.py`) and an entry here, its
settings in `config/`, its predictor in `inference/predictors/catalogue.py`, and recipes.
"""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TASKS = Registry(
    "task",
    language=Entry("dragoman.tasks.language_model:LanguageTask", "Language modeling"),
    classify=Entry("dragoman.tasks.classification:ClassificationTask", "Classification of texts"),
    tag=Entry("dragoman.tasks.tagging:TaggingTask", "Tagging of words or characters"),
    pairs=Entry(
        "dragoman.tasks.sentence_pair_classification:PairsTask", "Relation of two sentences"
    ),
    sets=Entry("dragoman.tasks.unordered_set_input_task:SetsTask", "Functions of sets"),
)
