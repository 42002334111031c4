"""Builds the demo model's training text from books. The caller's `random.Random` fixes the data."""

import json
import random
import re
from collections import Counter
from pathlib import Path

from tales import article, tale

WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
CLASS_OF = {noun: kind for kind, nouns in WORDS["nouns"].items() for noun in nouns}
NOUNS = sorted(CLASS_OF)

Chat = list[dict[str, str]]
TALES = 0.75
"""Share of stories that are made from plots.json. The others come from books."""

_QUOTES = str.maketrans({"‘": "'", "’": "'", "‚": "'", "“": '"', "”": '"', "„": '"', "—": "--", "–": "-", "…": "..."})
_BACK_MATTER = re.compile(
    r"\b(preface|contents|introduction|notes? and references|notes|index|illustrations|footnotes?|"
    r"transcriber|dedication|glossary|suggestions for|advertisements?)\b",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"^(chapter\b|\d{1,3}\b|[IVXLC]+\.)", re.IGNORECASE)
_STORY_START = re.compile(
    r"^(once upon a time|once on a time|there was once|there were once|there once|once there|long ago|long, long ago|"
    r"many years ago|a long time ago|in olden times|in the olden|in old times|there lived|there was a |a certain )",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?]['\")]*(?=\s|$)")


def plural(phrase: str) -> str:
    lead, _, noun = phrase.rpartition(" ")
    if noun in WORDS["irregular"]:
        many = WORDS["irregular"][noun]
    elif noun in ("wolf", "elf", "thief"):
        many = noun.rstrip("f") + "ves"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        many = noun[:-1] + "ies"
    else:
        many = noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "o")) else "s")
    return f"{lead} {many}".strip()


_SINGULAR = {form: noun for noun in NOUNS for form in (plural(noun), noun)}
_NOUN = re.compile(r"\b(" + "|".join(sorted(_SINGULAR, key=len, reverse=True)) + r")\b")


def clean(raw: str) -> list[str]:
    """Return the paragraphs without scanning marks and with plain quotes."""
    text = raw.translate(_QUOTES).replace("\r\n", "\n")
    text = re.sub(r"\[(Illustration|Picture|Footnote|Transcriber)[^\]]*\]", "", text)
    text = re.sub(r"\[\d+\]|\{\d+\}|\*+", "", text)
    text = re.sub(r"(?<!\w)[_=]+|[_=]+(?!\w)", "", text)
    paragraphs = (_unwrap(block) for block in re.split(r"\n\s*\n", text))
    return [p for p in paragraphs if re.search(r"[A-Za-z]", p)]


def _unwrap(block: str) -> str:
    """Join lines, except those of verse (short lines)."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in block.strip().split("\n")]
    verse = len(lines) > 1 and max(map(len, lines[:-1])) < 50
    return ("\n" if verse else " ").join(line for line in lines if line)


def _is_heading(paragraph: str) -> bool:
    if len(paragraph) > 75 or "\n" in paragraph or paragraph[0] in "\"'":
        return False
    if paragraph.isupper() or _NUMBERED.match(paragraph):
        return True
    words = re.findall(r"[A-Za-z']+", paragraph)
    titled = sum(w[0].isupper() for w in words)
    return paragraph[-1] not in ".,;:!?-'\")" and len(words) > 1 and titled >= len(words) - titled


def stories(paragraphs: list[str], shortest: int = 600) -> list[list[str]]:
    """Split at headings and openings like "Once upon a time". Drop contents, prefaces, notes, and stories of fewer than
    `shortest` characters.
    """
    found: list[list[str]] = []
    current: list[str] = []
    skipping = False
    for paragraph in paragraphs:
        if _is_heading(paragraph):
            found.append(current)
            current, skipping = [], bool(_BACK_MATTER.search(paragraph))
            continue
        if _STORY_START.match(paragraph) and sum(map(len, current)) > 1500:
            found.append(current)
            current = []
        if not skipping:
            current.append(paragraph)
    found.append(current)
    return [story for story in found if sum(map(len, story)) >= shortest]


def load_books(folder: Path) -> dict[str, list[list[str]]]:
    """Return each .txt file's stories, as lists of paragraphs. Raises ValueError if there are none."""
    books = {path.name: stories(clean(path.read_text("utf-8"))) for path in sorted(folder.glob("*.txt"))}
    if not any(books.values()):
        raise ValueError(f"no stories in {folder}: expected .txt files of at least one long story")
    return books


def draw_held_out(books: dict[str, list[list[str]]], rng: random.Random, share: float = 0.012) -> list[str]:
    """Return the names of randomly drawn small books that together have about `share` of all characters. Raises
    ValueError for fewer than two books.
    """
    size = {name: sum(len(p) for story in book for p in story) for name, book in books.items()}
    total = sum(size.values())
    if len(books) < 2:
        raise ValueError("the corpus needs two .txt files or more: one at least is held out")
    names = [name for name in sorted(books) if size[name] < total * share * 0.6] or [min(size, key=size.__getitem__)]
    rng.shuffle(names)
    held: list[str] = []
    while names and sum(size[n] for n in held) < total * share:
        held.append(names.pop())
    return held


def hold_out(books: dict[str, list[list[str]]], held: list[str]) -> list[list[str]]:
    """Return the other books without paragraphs that share 10 consecutive words with a held-out book, because a tale
    may be printed in several books.
    """
    seen = {gram for name in held for story in books[name] for p in story for gram in _word_runs(p)}
    train = []
    for name in sorted(set(books) - set(held)):
        for story in books[name]:
            kept = [p for p in story if seen.isdisjoint(_word_runs(p))]
            if sum(map(len, kept)) >= 600:
                train.append(kept)
    return train


def _word_runs(text: str, length: int = 10) -> list[int]:
    words = re.findall(r"[a-z]+", text.lower())
    return [hash(tuple(words[i : i + length])) for i in range(len(words) - length + 1)]


def passages(train: list[list[str]], per_noun: int = 500) -> dict[str, list[str]]:
    """Return passages by noun. A passage has up to 1,900 characters, with the noun in the first 160 and at least three
    times in the first 1,200.
    """
    found: dict[str, list[str]] = {noun: [] for noun in NOUNS}
    for story in train:
        for start, paragraph in enumerate(story):
            if len(paragraph) < 100 or paragraph[0] in "\"'(" or "\n" in paragraph:
                continue
            text = paragraph
            for following in story[start + 1 : start + 12]:
                if len(text) > 1900:
                    break
                text += "\n\n" + following
            text = text[:1900]
            counts = Counter(_SINGULAR[m.lower()] for m in _NOUN.findall(text[:1200].lower()))
            early = {_SINGULAR[m] for m in _NOUN.findall(text[:160].lower())}
            for noun in early:
                if counts[noun] >= 3 and counts[noun] >= max(counts.values()) * 0.6:
                    found[noun].append(text)
    # The limit drops passages from the middle of stories first.
    return {n: sorted(texts, key=lambda t: not _STORY_START.match(t))[:per_noun] for n, texts in found.items() if texts}


def cut(text: str, limit: int) -> str:
    """Shorten to at most `limit` characters, if possible to whole sentences."""
    ends = [m.end() for m in _SENTENCE_END.finditer(text[: limit + 1])]
    return text[: ends[-1]].rstrip() if ends else text[:limit].rsplit(" ", 1)[0]


def swap_noun(text: str, old: str, new: str) -> str:
    """Replace a noun, keep capitals, and adapt "a" and "an"."""

    def put(match: re.Match) -> str:
        lead, word = match.group(1) or "", match.group(2)
        other = new if word.lower() == old else plural(new)
        if lead:
            lead = lead[0] + ("n " if other[0] in "aeiou" and not other.startswith("uni") else " ")
        return lead + (other.capitalize() if word[0].isupper() else other)

    return re.sub(rf"\b([Aa]n? )?({re.escape(old)}|{re.escape(plural(old))})\b", put, text, flags=re.IGNORECASE)


def _opening(noun: str, phrase: str, rng: random.Random, name: str | None) -> str:
    """`phrase` is the noun, maybe with an adjective."""
    who = f"{article(phrase)} named {name}" if name else article(phrase)
    living = CLASS_OF[noun] != "thing"
    form = rng.choice(WORDS["openings"] + WORDS["openings_living"] if living else WORDS["openings"])
    return form.format(
        a=who, A=who[0].upper() + who[1:], n=noun, N=noun.capitalize(), place=rng.choice(WORDS["places"])
    )


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def story_turn(pool: dict[str, list[str]], rng: random.Random) -> Chat:
    """Another noun of the same class sometimes replaces the noun, so the model learns to copy it from the request."""
    noun = rng.choices(list(pool), [len(texts) ** 0.5 for texts in pool.values()])[0]
    text = rng.choice(pool[noun])
    start = bool(_STORY_START.match(text))
    if rng.random() < (0.15 if CLASS_OF[noun] == "thing" else 0.45):
        other = rng.choice([n for n in NOUNS if CLASS_OF[n] == CLASS_OF[noun]])
        noun, text = other, swap_noun(text, noun, other)
    adjective = f"{rng.choice(WORDS['adjectives'])} " if rng.random() < 0.25 else ""
    name = rng.choice(WORDS["names"]) if not adjective and CLASS_OF[noun] != "thing" and rng.random() < 0.08 else None
    second = rng.choice(NOUNS) if not adjective and not name and rng.random() < 0.08 else None
    phrase = adjective + noun
    about = article(phrase) + (f" named {name}" if name else "") + (f" and {article(second)}" if second else "")
    body = cut(text, rng.choice((350, 500, 700, 900, 1200, 1600)))
    if second:
        one, two = article(phrase), article(second)
        form = rng.choice(WORDS["pair_openings"])
        body = form.format(a=one, A=one.capitalize(), b=two, place=rng.choice(WORDS["places"])) + " " + body
    elif not start or adjective or name:
        body = _opening(noun, phrase, rng, name) + rng.choice(WORDS["bridges"]) + body
    if rng.random() < 0.35:
        body += rng.choice(WORDS["closings"])
    if second or name or rng.random() < 0.8:
        request = rng.choice(WORDS["requests"])
    else:
        request, about = rng.choice(WORDS["requests"]), rng.choice((f"the {phrase}", plural(phrase), phrase))
    request = request.format(x=about)
    if rng.random() < 0.2:
        request = request.lower() if rng.random() < 0.5 else request.rstrip(".?!")
    return [turn("user", request), turn("assistant", body)]


def made_up(noun: str, phrase: str, rng: random.Random, *, name: str | None = None, second: str | None = None) -> str:
    text = tale(noun, CLASS_OF, WORDS["places"], rng, name=name, friend=second)
    return _opening(noun, phrase, rng, name) + rng.choice(WORDS["bridges"]) + text


def tale_turn(rng: random.Random) -> Chat:
    noun = rng.choice(NOUNS)
    living = CLASS_OF[noun] != "thing"
    draw = rng.random()
    name = rng.choice(WORDS["names"]) if living and draw < 0.2 else None
    others = [each for each in NOUNS if CLASS_OF[each] != "thing" and each != noun]
    second = rng.choice(others) if living and 0.2 <= draw < 0.35 else None
    phrase = f"{rng.choice(WORDS['adjectives'])} {noun}" if draw > 0.7 else noun
    about = article(phrase) + (f" named {name}" if name else "") + (f" and {article(second)}" if second else "")
    if rng.random() < 0.2 and not name and not second:
        about = rng.choice((f"the {phrase}", plural(phrase), phrase))
    request = rng.choice(WORDS["requests"]).format(x=about)
    if rng.random() < 0.2:
        request = request.lower() if rng.random() < 0.5 else request.rstrip(".?!")
    body = made_up(noun, phrase, rng, name=name, second=second)
    return [
        turn("user", request),
        turn("assistant", body + (rng.choice(WORDS["closings"]) if rng.random() < 0.5 else "")),
    ]


def free_turn(openings: list[str], rng: random.Random) -> Chat:
    noun = rng.choice(NOUNS)
    text = made_up(noun, noun, rng) if rng.random() < TALES else cut(rng.choice(openings), rng.choice((350, 600, 900)))
    if rng.random() < 0.3:
        given = " ".join(text.split()[: rng.randint(4, 12)])
        request = rng.choice(("{}", "{}...", "Continue this story: {}", "Go on: {}")).format(given)
    else:
        request = rng.choice(WORDS["start_requests"])
    return [turn("user", request), turn("assistant", text)]


def question_turns(folder: Path, train: list[list[str]], most: int = 6000) -> list[Chat]:
    """Read `*.jsonl` files with fields "question" and "answer". A request quotes a paragraph with the answer."""
    by_word: dict[str, set[int]] = {}
    texts = [p for story in train for p in story if 120 < len(p) < 900]
    for index, paragraph in enumerate(texts):
        for word in set(re.findall(r"[a-z]{3,}", paragraph.lower())):
            by_word.setdefault(word, set()).add(index)
    turns = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            item = json.loads(line)
            question, answer = item["question"].strip(), item["answer"].strip().rstrip(".")
            words = re.findall(r"[a-z]{3,}", f"{question} {answer}".lower())
            votes = Counter(i for w in words if len(by_word.get(w, ())) < 2000 for i in by_word.get(w, ()))
            best = [i for i, n in votes.most_common(5) if n >= 3 and answer.lower() in texts[i].lower()]
            if best and len(answer) > 2:
                request = f"{texts[best[0]]}\n\n{question}"
                reply = answer[0].upper() + answer[1:] + "."
                turns.append([turn("user", request), turn("assistant", reply)])
    return turns[:most]


def chats(folder: Path, train: list[list[str]], count: int, rng: random.Random) -> list[Chat]:
    pool = passages(train)
    openings = ["\n\n".join(story[:6]) for story in train if len(story[0]) > 80 and _STORY_START.match(story[0])]
    questions = question_turns(folder, train)
    made = []
    for _ in range(count):
        turns: Chat = []
        for _ in range(1 if rng.random() < 0.88 else 2):
            draw = rng.random()
            if draw < 0.80 or not openings:
                turns += tale_turn(rng) if rng.random() < TALES else story_turn(pool, rng)
            elif draw < 0.88:
                turns += free_turn(openings, rng)
            elif draw < 0.92 and questions:
                turns += rng.choice(questions)
            else:
                asked, replies = rng.choice(WORDS["small_talk"])
                turns += [turn("user", rng.choice(asked)), turn("assistant", rng.choice(replies))]
        if rng.random() < 0.25:
            turns.insert(0, turn("system", rng.choice(WORDS["system_prompts"])))
        made.append(turns)
    return made
