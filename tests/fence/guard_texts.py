"""Texts that repeat legally, and texts as models that loop write them."""

from __future__ import annotations

import base64
import random


def _rows(template: str, count: int, seed: int) -> str:
    rng = random.Random(seed)
    return "".join(
        template.format(i=i, n=rng.randrange(10_000), x=f"{rng.random() * 100:.2f}", w=rng.choice(_WORDS))
        for i in range(count)
    )


_WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "paper",
    "light",
    "green",
    "house",
    "music",
    "table",
    "north",
    "winter",
    "bread",
    "glass",
    "horse",
]


def _hex_dump(count: int, seed: int | None) -> str:
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        values = [0] * 16 if seed is None else [rng.randrange(256) for _ in range(16)]
        lines.append(f"{i * 16:08x}  " + " ".join(f"{v:02x}" for v in values) + "\n")
    return "".join(lines)


LEGAL: dict[str, str] = {
    "dashes": "-" * 900,
    "equals": "Title\n" + "=" * 700 + "\n",
    "stars": "*" * 600,
    "underscores": "Signature: " + "_" * 400,
    "dots of a table of contents": _rows("{i}. {w} " + "." * 60 + " {n}\n", 25, 1),
    "table separator": "|" + " --- |" * 60,
    "tight table separator": "|" + ":---:|" * 60,
    "empty table": "| a | b | c | d |\n|---|---|---|---|\n" + "|   |   |   |   |\n" * 30,
    "table of numbers": "| id | n | x |\n|---|---|---|\n" + _rows("| {i} | {n} | {x} |\n", 40, 2),
    "table of words": _rows("| {i} | {w} | yes |\n", 40, 3),
    "zeros": "0" * 700,
    "zeros in a list": "[" + "0, " * 300 + "0]",
    "matrix of zeros": "[" + "[0, 0, 0, 0, 0, 0, 0, 0],\n" * 16 + "]",
    "identity matrix": "".join(" ".join("1" if i == j else "0" for j in range(20)) + "\n" for i in range(20)),
    "csv of zeros": "a,b,c\n" + "0,0,0\n" * 100,
    "csv": "id,name,score\n" + _rows("{i},{w},{x}\n", 60, 4),
    "csv with a constant column": _rows("{i},{w},active,2024-01-01,{n}\n", 40, 5),
    "spaces": "x" + " " * 600 + "y",
    "blank lines": "\n" * 300,
    "tabs": "\t" * 300,
    "deep indentation": "".join("    " * i + f"if a{i}:\n" for i in range(25)),
    "closing brackets": "".join("    " * i + "}\n" for i in range(25, -1, -1)),
    "brackets": "[" * 200 + "]" * 200,
    "base64 of zeros": base64.b64encode(bytes(900)).decode(),
    "base64": base64.b64encode(random.Random(6).randbytes(700)).decode(),
    "base64 of a pattern": base64.b64encode(b"\x00\xff" * 300).decode(),
    "hex dump of zeros": _hex_dump(30, None),
    "hex dump": _hex_dump(25, 7),
    "hex string": random.Random(8).randbytes(400).hex(),
    "sha of zeros": "0x" + "00" * 300,
    "records": "[" + _rows('{{"id": {i}, "name": "{w}", "score": {x}, "active": true}},\n', 40, 9) + "]",
    "records with a long constant part": _rows(
        '{{"type": "measurement", "unit": "celsius", "source": "sensor", "valid": true, "value": {x}}},\n', 30, 10
    ),
    "equal records": "[" + '{"x": 0, "y": 0},\n' * 18 + "]",
    "equal records with words": '{"name": "", "email": null, "age": null},\n' * 10,
    "ha ha ha": "That is so funny! " + "ha " * 80,
    "na na na": "Na na na na, hey hey, goodbye\n" * 4 + "la la la la " * 20,
    "laughing": "ha" * 120,
    "cheers": "Hip hip hooray! " * 6,
    "refrain": "".join(
        f"{verse}\nOh the wind and the rain, the wind and the rain,\nfor the rain it falls down every day.\n\n"
        for verse in (
            "When I was young and went to sea,",
            "When I came home with empty hands,",
            "A fool I was and a fool will be,",
            "The house was cold, the door was shut,",
            "So here I sit and here I sing,",
        )
    ),
    "bottles": "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer. Take one down, pass it around, "
        f"{n - 1} bottles of beer on the wall.\n"
        for n in range(30, 1, -1)
    ),
    "html cells": "<table>\n" + ("<tr>" + "<td></td>" * 8 + "</tr>\n") * 6 + "</table>",
    "html list": "<ul>\n" + _rows('  <li class="item"><a href="/p/{n}">{w}</a></li>\n', 30, 11) + "</ul>",
    "svg path": "M 0 0 " + _rows("L {n} {x} ", 60, 12),
    "assembly": "nop\n" * 80,
    "assertions": _rows("    assert f({i}) == {n}\n", 50, 13),
    "switch": _rows("    case {i}:\n        return {n};\n", 40, 14),
    "inserts": _rows(
        "INSERT INTO users (id, name, email, created, updated) VALUES ({i}, '{w}', '{w}@example.org', NOW(), NOW());\n",
        25,
        15,
    ),
    "log": _rows("2024-05-01 12:00:{i:02d} INFO worker {n}: heartbeat received, nothing to do\n", 40, 16),
    "counting": " ".join(map(str, range(1, 300))),
    "even numbers": ", ".join(str(2 * i) for i in range(250)),
    "powers": "\n".join(f"2^{i} = {2**i}" for i in range(60)),
    "multiplication": "\n".join(f"{i} x {j} = {i * j}" for i in range(2, 9) for j in range(1, 11)),
    "fraction": "1/7 = 0." + "142857" * 60,
    "decimals": "1/3 = 0." + "3" * 400,
    "dna": "".join(random.Random(17).choices("ACGT", k=600)),
    "dna repeat": "CAG" * 120,
    "checkers": ("# . " * 8 + "\n" + ". # " * 8 + "\n") * 8,
    "box": "╔" + "═" * 200 + "╗\n" + ("║" + " " * 60 + "║\n") * 12 + "╚" + "═" * 200 + "╝",
    "bar chart": "".join(f"{w:8}" + "█" * (3 * i + 1) + "\n" for i, w in enumerate(_WORDS)),
    "board": "+---+---+---+\n|   |   |   |\n" * 12 + "+---+---+---+\n",
    "tree": "".join(f"{'│   ' * (i % 5)}├── {w}_{i}.txt\n" for i, w in enumerate(_WORDS * 3)),
    "emoji": "🎉" * 60,
    "scream": "A" * 400 + "!" * 200,
    "crosswords": ".....\n" * 40,
}

_SENTENCES = [
    "The answer is 42. ",
    "I am sorry, but I cannot help with that. ",
    "Let me think about this step by step. ",
    "I should check. Wait, let me check again. ",
    "Wait, but maybe the question is asking for something else. Hmm. ",
    "So the final answer is the sum of the two numbers. ",
    "The capital of France is Paris, which is also the largest city of France. ",
    "Is there anything else that I can help you with today? ",
    "The function returns the value of the variable, and the variable is returned by the function. ",
    "Please note that this is only an example and not a real document. ",
    "Actually, no. Let me reconsider. Actually, that was right. ",
    "In conclusion, it is important to note that the results are important. ",
    "- The user wants a list of items.\n",
    "1. Open the file and read its content.\n",
    "Thank you for your question! I am happy to help. ",
    "He went to the store and then he went to the store. ",
    "Der Hund läuft durch den Garten und sucht seinen Ball. ",
    "Je ne sais pas ce que vous voulez dire par là. ",
    "No lo sé, pero puedo buscar la respuesta. ",
    "我们需要检查一下答案是否正确。",
    "もう一度確認してみましょう。",
    "Я не уверен, что это правильный ответ. ",
    "안녕하세요 저는 도움을 드릴 수 있습니다. ",
    '{"thought": "I need to search again", "action": "search", "query": "weather"}\n',
    "print('hello world')  # print the greeting to the screen\n",
    "    if value is not None and value > 0:\n        return compute(value)\n",
    "import numpy as np\nimport pandas as pd\n",
    "// This method handles the request and returns the response.\n",
    "Question: What is the name of the cat?\nAnswer: The name of the cat is Tom.\n",
    "User: hello\nAssistant: Hello! How can I help you?\n",
]

_PARAGRAPH = (
    "The train left the station early in the morning, when fog still lay over the fields. An old man sat by the "
    "window and read a letter that his daughter had sent from the coast. She wrote about her garden, the price of "
    "fish, and a storm that had broken two of the tallest trees. He folded the paper, looked outside, and wondered "
    "whether anybody there would still know his name. "
)
_REASONING = (
    "Okay, so we have two workers and each of them paints one wall in six hours. Together they would need three hours "
    "for one wall. But the problem says that the second worker begins later, so that must be taken into account. Let "
    "me write the equation: the first has painted for t hours, the second for t minus one. If both rates are one "
    "sixth, the sum of the two terms must be one, and this gives a time that I can verify. "
)
_LONG = (
    " ".join(
        f"Then {a} follows {b} because the {b} of the {a} was never {c}."
        for a, b, c in zip(_WORDS * 2, _WORDS[3:] + _WORDS + _WORDS, _WORDS[7:] + _WORDS * 2, strict=False)
    )
    + " "
)

LOOPING: dict[str, str] = {
    **{f"sentence: {text.strip()[:30]}": "Sure. " + text * 60 for text in _SENTENCES},
    "paragraph": _PARAGRAPH * 8,
    "reasoning": "<think>\n" + _REASONING * 8,
    "a page": _LONG * 6,
    "restarts with other words between": "".join(
        f"Attempt {w}, number {i * 37 % 101}. {_PARAGRAPH}" for i, w in enumerate(_WORDS[:10])
    ),
    "reasoning restarts": "".join(
        f"{w.capitalize()}! {'Hmm. ' * (i % 3)}{_REASONING}" for i, w in enumerate(_WORDS[:10])
    ),
    "two paragraphs in any order": "".join(
        random.Random(1).choice([_PARAGRAPH, _REASONING]) if i % 3 else _PARAGRAPH + _REASONING for i in range(14)
    ),
    "one word": "very " * 700,
    "two words": "the same " * 400,
    "one token": "!" * 8 + " Error" * 600,
    "symbols without end": "0 1 " * 500,
}
