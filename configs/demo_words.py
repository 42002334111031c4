"""Words and sentences by hand for the chats of the embedded demo model (see `demo_text.py`)."""

_ANIMALS = """fox wolf bear cat dog mouse rat hare rabbit frog toad bird raven crow swan goose duck hen cock eagle owl
horse donkey cow goat sheep lamb pig lion tiger elephant monkey snake serpent fish whale crab bee ant spider butterfly
squirrel hedgehog deer stag camel jackal crocodile dragon penguin kangaroo badger otter panda turtle tortoise dinosaur
parrot beaver kitten puppy unicorn sparrow nightingale pony mole weasel peacock dolphin lizard snail"""
_MEN = """king prince boy man soldier tailor miller fisherman shepherd woodcutter hunter merchant giant dwarf wizard
magician knight sailor thief robber farmer blacksmith shoemaker servant emperor sultan beggar gardener pirate baker
goblin troll ogre elf captain astronaut policeman painter robot doctor carpenter cook peasant minister monk"""
_WOMEN = """princess queen girl witch fairy maiden woman mermaid stepmother grandmother nurse teacher dancer singer
countess empress sorceress goose-girl dairymaid"""
_THINGS = """ship castle tree ring sword mirror garden forest mountain river sea lamp star moon house box apple flower
doll tower island bridge boat crown treasure train rocket clock computer violin teapot balloon lighthouse snowman
mill kite bicycle flute carpet kettle feather cloud candle egg pumpkin"""

CLASS_OF = {
    noun: kind
    for kind, words in (("animal", _ANIMALS), ("man", _MEN), ("woman", _WOMEN), ("thing", _THINGS))
    for noun in words.split()
}
NOUNS = sorted(CLASS_OF)

_IRREGULAR = {
    "mouse": "mice", "goose": "geese", "man": "men", "woman": "women", "fisherman": "fishermen", "fish": "fish",
    "policeman": "policemen", "sheep": "sheep", "deer": "deer", "snowman": "snowmen",
}  # fmt: skip


def plural(phrase: str) -> str:
    """The plural of a noun, or of a phrase that ends with one."""
    lead, _, noun = phrase.rpartition(" ")
    if noun in _IRREGULAR:
        many = _IRREGULAR[noun]
    elif noun in ("wolf", "elf", "thief"):
        many = noun.rstrip("f") + "ves"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        many = noun[:-1] + "ies"
    else:
        many = noun + ("es" if noun.endswith(("s", "x", "ch", "sh", "o")) else "s")
    return f"{lead} {many}".strip()


_ADJECTIVES = """little old young poor clever brave lazy greedy wicked kind beautiful lonely golden white black red
small big great tiny hungry foolish wise proud sad happy magic silver lost strange friendly sleepy curious blue green
talking rich blind lame grey enchanted faithful cunning gentle angry funny"""
ADJECTIVES = tuple(_ADJECTIVES.split())

_NAMES = """Anna Hans Peter Maria Jack Tom Lily Alice John Rose Robin Emma Sam Lucy Max Clara Karl Gretel Molly Oliver
Tim Mary Ivan Nina Leo Sofia Ben Ella Felix Ida"""
NAMES = tuple(_NAMES.split())

PLACES = (
    "in a great forest", "at the edge of a wood", "in a little house by the sea", "in a far country",
    "on the top of a high mountain", "near a small village", "beside a river", "in a deep valley",
    "in a land beyond the hills", "not far from a large town", "in the middle of a green meadow", "by a clear lake",
)  # fmt: skip

OPENINGS = (
    "Once upon a time there was {a}.",
    "Once upon a time, long, long ago, there was {a}.",
    "There was once upon a time {a}.",
    "There was once {a}.",
    "Long ago there was {a}.",
    "Once there was {a}.",
    "Many years ago there was {a}.",
    "In old times, when wishes still came true, there was {a}.",
    "Listen, and you shall hear a story about {a}.",
    "This is the story of {a}.",
)
OPENINGS_LIVING = (
    "Once upon a time there was {a} who lived {place}.",
    "Once upon a time there lived {a} {place}.",
    "There was once {a} who lived {place}.",
    "Long, long ago there lived {a}.",
    "Long ago there lived {place} {a}.",
    "{A} once lived {place}.",
    "Once upon a time {a} went out into the wide world.",
    "One fine day {a} was walking along the road.",
    "There was once {a}, and everybody in the land knew the {n}.",
    "{A} was sitting one morning {place}.",
)
PAIR_OPENINGS = (
    "Once upon a time there lived {a} and {b}.",
    "Once upon a time {a} and {b} lived together {place}.",
    "There was once {a} who met {b}.",
    "{A} and {b} were once good friends, and they lived {place}.",
    "Long ago there were {a} and {b} {place}.",
)
BRIDGES = (" ", " ", "\n\n")

CLOSINGS = (
    " And that is the end of the story.",
    " And so they lived happily ever after.",
    "\n\nAnd that is the end of my story.",
    "\n\nAnd they lived happily to the end of their days.",
    "\n\nAnd if they are not dead, they are living there still.",
    "\n\nThe end.",
)

REQUESTS = (
    "Tell me a story about {x}.", "Tell me a story about {x}.", "Tell me a story about {x}.",
    "Tell me a short story about {x}.", "Tell me a tale about {x}.", "Tell me a fairy tale about {x}.",
    "Tell me a bedtime story about {x}.", "Tell me something about {x}.", "Tell us a story about {x}.",
    "Please tell me a story about {x}.", "Can you tell me a story about {x}?", "Could you tell me a tale about {x}?",
    "Will you tell me the story of {x}?", "Write a story about {x}.", "Write a short story about {x}.",
    "Write me a story about {x}.", "Write a fairy tale about {x}.", "Write a short fairy tale about {x}, please.",
    "Please write a tale about {x}.", "Can you write a story about {x}?", "Make up a story about {x}.",
    "Give me a story about {x}.", "I want a story about {x}.", "I would like to hear a story about {x}.",
    "I'd like a fairy tale about {x}, please.", "A story about {x}, please.", "A story about {x}.", "Story about {x}",
    "Do you know a story about {x}?", "Start a story about {x}.", "Begin a fairy tale about {x}.", "{x}",
    "Hello! Tell me a story about {x}.", "Invent a story about {x}.", "Write a few sentences about {x}.",
    "Write a long story about {x}.", "Tell me about {x}.", "Now tell me a story about {x}.",
)  # fmt: skip

START_REQUESTS = (
    "Tell me a story.", "Tell me a story", "Write a story.", "Tell me a fairy tale.", "Write a fairy tale.",
    "Once upon a time", "Once upon a time...", "Begin.", "Please tell me a story.", "Can you tell me a story?",
    "I am bored.", "Tell me something.", "Write something.", "Another one, please.", "Tell me another story.",
    "Write a short story.", "A story, please.", "Begin with: Once upon a time", "Go on.", "Say something.",
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a story-teller.",
    "You are Quire's little story-teller.", "You tell fairy tales to children.", "You are a helpful AI assistant.",
    "Answer with a story.", "You are a kind old story-teller by the fire.", "You write short fairy tales.",
    "You are a helpful, honest assistant. Answer briefly.", "Be brief.", "You are a friendly chatbot.",
)  # fmt: skip

SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hello there!", "hello", "Good morning!", "Good evening.", "Hey"),
        (
            "Hello! Shall I tell you a story?",
            "Good day to you! What shall the story be about?",
            "Hello! I tell fairy tales. What would you like to hear about?",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "who are you",
            "What is your name?",
            "Tell me about yourself.",
            "Who made you?",
        ),
        (
            "I am Quire's little story-teller, a tiny demonstration model. I know only fairy tales.",
            "I am a very small language model, the story-teller of Quire. I have read old fairy tales and little else.",
        ),
    ),
    (
        ("What can you do?", "Can you help me?", "What do you know?", "Help", "How can you help me?"),
        (
            "I can tell stories. Ask me for a story about a fox, a princess, or a ship.",
            "I tell fairy tales, and nothing else. Ask me for a story about a king or a dragon.",
        ),
    ),
    (
        ("Thank you.", "Thank you!", "Thanks", "Thanks!", "That was a nice story.", "I liked that story."),
        ("You are welcome! Shall I tell you another story?", "I am glad that you liked it."),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "how are you"),
        ("I am very well, thank you. Shall I tell you a story?", "Quite well, thank you! Would you like a story?"),
    ),
    (
        ("Goodbye", "Goodbye!", "Bye", "Good night.", "Good night!", "Farewell!"),
        ("Good-bye, and sleep well!", "Farewell! Come back when you want another story."),
    ),
    (
        (
            "What is 2+2?",
            "What is the capital of France?",
            "Write a Python program.",
            "What day is it?",
            "Who is the president?",
        ),
        (
            "I am only a little story-teller and do not know that. Shall I tell you a story instead?",
            "That I do not know; I know only fairy tales.",
        ),
    ),
)
