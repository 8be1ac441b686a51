"""Multiple choice by lm-eval's own code: `python lm_eval_numbers.py`.

Needs lm-eval 0.4.13 and tether's own packages; printed numbers stand in test_multiple_choice.py.
"""

import json
import random
import tempfile
from pathlib import Path

WORDS = [
    *("river", "stone", "cloud", "garden", "music", "table", "window", "paper", "bread", "silver"),
    *("horse", "winter", "candle", "bridge", "forest", "mirror", "ocean", "letter", "button"),
    "market",
]


def tokenizer():
    """Bytes merged into words that begin with a space, so that spaces stand in tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS), "Question: Answer: The following are"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")


def rows(layout, count=60):
    """Made-up questions whose choices differ in length and in bytes a character."""
    drawn = random.Random(7)

    def phrase(least, most):
        return " ".join(
            drawn.choices([*WORDS, "café", "naïve", "Überfluß"], k=drawn.randint(least, most)),
        )

    made = []
    for number in range(count):
        choices, answer = [f"{phrase(1, 5)} {place}" for place in range(4)], drawn.randrange(4)
        question = phrase(4, 12) + ("?" if number % 3 else " ? ")
        if layout == "arc":
            labels = ["1", "2", "3", "4"] if number % 2 else ["A", "B", "C", "D"]
            options = {"text": choices, "label": labels}
            made.append({"question": question, "choices": options, "answerKey": labels[answer]})
        elif layout == "mmlu":
            subject = "abstract_algebra"
            made.append(
                {"question": question, "subject": subject, "choices": choices, "answer": answer},
            )
        else:
            made.append(
                {
                    "activity_label": phrase(1, 2),
                    "ctx_a": f"{phrase(3, 8)}. [header] {phrase(2, 4)} [title] {phrase(1, 3)}.",
                    "ctx_b": "the man" if number % 2 else "",
                    "endings": [f"{choice} [step]  {phrase(1, 2)}." for choice in choices],
                    "label": str(answer),
                },
            )
    return made


TASKS = {
    "arc": {
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
    },
    "mmlu": {
        "description": "The following are multiple choice questions (with answers) about abstract "
        "algebra.\n\n",
        "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\n"
        "C. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "answer",
    },
    "hellaswag": {
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
    },
}
METRICS = ("acc", "acc_norm", "acc_bytes")


def main():
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.hellaswag.utils import process_docs

    from tether.models.tiny import tiny_model

    model = HFLM(pretrained=tiny_model(vocab=360).eval(), tokenizer=tokenizer(), batch_size=8)
    for layout, wording in TASKS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "test.jsonl"
            path.write_text("\n".join(map(json.dumps, rows(layout))))
            task = {
                "task": layout,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(path)}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "metric_list": [{"metric": metric} for metric in METRICS],
                **({"process_docs": process_docs} if layout == "hellaswag" else {}),
                **wording,
            }
            result = lm_eval.simple_evaluate(
                model=model,
                tasks=[task],
                bootstrap_iters=0,
                log_samples=True,
            )
        figures = [round(60 * result["results"][layout][f"{metric},none"]) for metric in METRICS]
        samples = sorted(result["samples"][layout], key=lambda sample: sample["doc_id"])
        logprobs = [
            round(float(answer[0]), 3)
            for sample in samples[:4]
            for answer in sample["filtered_resps"]
        ]
        print(layout, figures, logprobs)


if __name__ == "__main__":
    main()
