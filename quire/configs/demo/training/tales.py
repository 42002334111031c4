"""Tales from plots.json. Old books alone teach a small model how sentences sound, but not that they follow from each
other.
"""

import json
import random
from pathlib import Path

PLOTS = json.loads(Path(__file__).with_name("plots.json").read_text(encoding="utf-8"))
_PRONOUNS = {True: ("she", "her", "her"), False: ("he", "him", "his")}
_PARAGRAPH = 3  # sentences


def article(phrase: str) -> str:
    return ("an " if phrase[0].lower() in "aeiou" and not phrase.startswith(("uni", "one")) else "a ") + phrase


def tale(
    noun: str,
    kinds: dict[str, str],
    places: list[str],
    rng: random.Random,
    *,
    name: str | None = None,
    friend: str | None = None,
) -> str:
    """`kinds` maps each noun to animal, man, woman or thing."""
    kind = "living" if kinds[noun] != "thing" else "thing"
    plots = PLOTS[kind] if kind == "living" or noun in PLOTS["portable"] else PLOTS[kind][-1:]
    living = [each for each, its in kinds.items() if its != "thing" and each not in (noun, *PLOTS["foes"])]
    people = [each for each in living if kinds[each] in ("man", "woman")]
    friend = friend or rng.choice(living)
    owner = rng.choice([each for each in people if each != friend])
    foe = rng.choice([each for each in PLOTS["foes"] if each not in (noun, friend)])
    thing = rng.choice(PLOTS["things"])
    he, him, his = _pronouns(kinds[noun])
    words = {"he": he, "him": him, "his": his, "the_hero": name or f"the {noun}", "noun": noun}
    words |= {
        "thing": thing,
        "a_thing": article(thing),
        "food": rng.choice(PLOTS["foods"]),
        "place": rng.choice(places),
    }
    words |= _words("friend", "f", friend, kinds) | _words("foe", "o", foe, kinds)
    ofs = _words("owner", "o", owner, kinds)
    words |= ofs if kind == "thing" else {"a_owner": ofs["a_owner"], "the_owner": ofs["the_owner"]}
    words |= {key[0].upper() + key[1:]: word[0].upper() + word[1:] for key, word in words.items()}
    sentences = [rng.choice(choices).format(**words) for choices in rng.choice(plots)]
    paragraphs = [sentences[at : at + _PARAGRAPH] for at in range(0, len(sentences), _PARAGRAPH)]
    return "\n\n".join(" ".join(each) for each in paragraphs)


def _pronouns(kind: str) -> tuple[str, str, str]:
    return _PRONOUNS[kind == "woman"]


def _words(role: str, prefix: str, noun: str, kinds: dict[str, str]) -> dict[str, str]:
    he, him, his = _pronouns(kinds[noun])
    named = {f"a_{role}": article(noun), f"the_{role}": f"the {noun}"}
    return named | {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}
