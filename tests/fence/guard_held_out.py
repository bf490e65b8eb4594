"""Texts that no threshold of the loop guard was chosen by: written before it was first measured on them."""

from __future__ import annotations

import random

_NAMES = ["Ada", "Boris", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana", "Igor", "Jun", "Kofi", "Lena"]
_PLACES = ["harbour", "library", "market", "bridge", "school", "garden", "museum", "station", "bakery", "theatre"]

_CHORUS = (
    "So hold the light above the door,\nand sing the song we sang before,\n"
    "the night is long, the road is wide,\nbut you and I walk side by side.\n\n"
)
_VERSES = [
    "I packed my coat, I packed my shoes,\nI left the town without the news.\n\n",
    "The train was late, the sky was grey,\nI wrote your name along the way.\n\n",
    "A stranger asked me for the time,\nI gave him half a silver dime.\n\n",
    "Tomorrow I will find the sea,\nand you will come and follow me.\n\n",
]
_GIFTS = [
    "a partridge in a pear tree",
    "two turtle doves",
    "three French hens",
    "four calling birds",
    "five gold rings",
    "six geese a-laying",
    "seven swans a-swimming",
    "eight maids a-milking",
    "nine ladies dancing",
    "ten lords a-leaping",
]


def _unit_test(i: int, name: str) -> str:
    return (
        f"def test_{name.lower()}_is_found(client):\n    response = client.get('/users/{i}')\n"
        f"    assert response.status_code == 200\n    assert response.json()['name'] == '{name}'\n\n\n"
    )


def _service(name: str, port: int) -> str:
    return (
        f"---\napiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  labels:\n    app: {name}\nspec:\n"
        f"  type: ClusterIP\n  selector:\n    app: {name}\n  ports:\n    - name: http\n      port: {port}\n"
        f"      targetPort: {port}\n      protocol: TCP\n"
    )


def _epoch(i: int, rng: random.Random) -> str:
    loss = 2.5 / (i + 1)
    return (
        f"Epoch {i + 1}/30 - {rng.randrange(10, 99)}s - loss: {loss:.4f} - accuracy: {1 - loss / 3:.4f} - "
        f"val_loss: {loss * 1.1:.4f} - val_accuracy: {0.98 - loss / 3:.4f}\n"
    )


LEGAL: dict[str, str] = {
    "song with a long chorus": "".join(verse + _CHORUS for verse in _VERSES),
    "twelve days": "".join(
        f"On day {n} of Christmas my true love gave to me\n" + ",\n".join(reversed(_GIFTS[:n])) + ".\n\n"
        for n in range(1, 11)
    ),
    "litany": "".join(f"For the {place} and all who work there,\nwe give you thanks.\n" for place in _PLACES * 2),
    "unit tests": "".join(_unit_test(i, name) for i, name in enumerate(_NAMES * 2)),
    "manifests": "".join(_service(f"{place}-api", 8000 + i) for i, place in enumerate(_PLACES)),
    "training log": "".join(_epoch(i, random.Random(i)) for i in range(30)),
    "quiz with the same options": "".join(
        f"{i + 1}. Is the {place} open on Sunday?\n   A. Yes\n   B. No\n   C. It depends\n   D. I do not know\n\n"
        for i, place in enumerate(_PLACES * 2)
    ),
    "truth table": "| p | q | r | p and q | p or r |\n|---|---|---|---|---|\n"
    + "".join(f"| {bool(i & 4)} | {bool(i & 2)} | {bool(i & 1)} | {(i & 6) == 6} | {bool(i & 5)} |\n" for i in range(8))
    * 3,
    "stack of a recursion": 'Exception in thread "main" java.lang.StackOverflowError\n'
    + "\tat com.example.Tree.depth(Tree.java:42)\n" * 12,
    "css": "".join(
        f".{place}-{i} {{\n  display: flex;\n  margin: 0 auto;\n  padding: {i}px;\n  width: 100%;\n}}\n"
        for i, place in enumerate(_PLACES * 2)
    ),
    "latex matrix": "\\begin{pmatrix}\n" + (" & ".join(["0"] * 12) + " \\\\\n") * 12 + "\\end{pmatrix}",
    "bibliography": "".join(
        f"@article{{{name.lower()}{1990 + i},\n  author = {{{name}, A.}},\n  title = {{On the {place}}},\n"
        f"  journal = {{Journal of Applied Studies}},\n  year = {{{1990 + i}}},\n  publisher = {{Springer}}\n}}\n"
        for i, (name, place) in enumerate(zip(_NAMES, _PLACES * 2, strict=False))
    ),
    "protobuf": "".join(
        f"message {name} {{\n  string id = 1;\n  string name = 2;\n  int64 created_at = 3;\n"
        f"  int64 updated_at = 4;\n}}\n\n"
        for name in _NAMES
    ),
    "getters": "".join(
        f"    public String get{place.title()}() {{\n        return this.{place};\n    }}\n\n"
        f"    public void set{place.title()}(String {place}) {{\n        this.{place} = {place};\n    }}\n\n"
        for place in _PLACES * 2
    ),
    "timetable": "".join(
        f"{6 + i // 4:02d}:{15 * (i % 4):02d}  Central Station - Airport Terminal 1  Platform {i % 3 + 1}  on time\n"
        for i in range(48)
    ),
    "drum pattern": "HH|x-x-x-x-x-x-x-x-|\nSD|----o-------o---|\nBD|o-------o-------|\n\n" * 12,
    "morse": "... --- ... " * 60,
    "contract": "".join(
        f"{i + 1}. The party of the first part shall deliver the {place} keys to the party of the second part, and the "
        f"party of the second part shall pay {100 * (i + 3)} crowns to the party of the first part.\n"
        for i, place in enumerate(_PLACES)
    ),
    "lines to be written twenty times": "I will not talk in class.\n" * 20,
    "game of life": "".join(
        "".join("#" if (x * x + y * t) % 7 == 0 else "." for x in range(30)) + "\n" for t in range(4) for y in range(12)
    ),
}

_STORY = (
    "When the lamp went out, Mira counted the steps to the cellar and wondered why the old clock had stopped at nine. "
    "Her brother called from the kitchen that supper was ready, but the smell of smoke made her turn around. Through "
    "the window she saw a lantern moving between the apple trees, slowly, as if somebody were looking for a thing "
    "that had been buried a long time ago. "
)
_PROOF = (
    "Suppose that n is even. Then n equals two times k for some integer k, and the square of n is four times the "
    "square of k, which is even as well. Hence the claim holds in this case. Now suppose that n is odd. Then n is "
    "two k plus one, and the square is four k squared plus four k plus one, which is odd, as we wanted to show. "
)
_CODE = (
    "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] < right[0]:\n"
    "            result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n"
    "    return result + left + right\n\n"
)
_LONG = " ".join(
    f"The {place} was closed when {name} arrived, so the key stayed with the guard of the {other}."
    for name, place, other in zip(_NAMES * 2, _PLACES * 3, [*_PLACES[3:], *_PLACES * 2], strict=False)
)

LOOPING: dict[str, str] = {
    "story told again and again": _STORY * 9,
    "proof": "Proof. " + _PROOF * 9,
    "the same function": "```python\n" + _CODE * 14,
    "a list that begins anew": "".join(f"- {name} from the {_PLACES[i % 10]}\n" for i, name in enumerate(_NAMES)) * 14,
    "long period": (_LONG + "\n") * 7,
    "dialogue": "A: Are you sure about that?\nB: Yes, I am quite sure about that.\n" * 30,
    "headings": "## Conclusion\n\nIn this section we have discussed the main points.\n\n" * 30,
    "apology": "I apologize for the confusion. You are right. Let me correct my answer. " * 30,
    "call": '<call>{"name": "read_file", "arguments": {"path": "src/main.py", "offset": 0}}</call>\n' * 30,
    "address": "https://www.example.com/images/products/large/blue-shirt.png\n" * 40,
    "doubt": "".join(
        f"{'But wait' if i % 2 else 'Hmm, wait'}, the question says that each child gets three sweets, so there must "
        "be twelve sweets in the bag, and four children share them, which gives three sweets for each child. "
        for i in range(24)
    ),
    "three passages by turns": "".join(random.Random(3).sample([_STORY, _PROOF, _CODE], 3)[i % 3] for i in range(18)),
    "passages with new words between": "".join(f"{name} said it once more. {_STORY}" for name in _NAMES),
    "italian": "Non sono sicuro che questa sia la risposta giusta, ma proviamo ancora una volta. " * 30,
    "numbered doubts": "".join(
        f"Attempt {i}: I multiply both sides by two and find that the left side is equal to the right side, but "
        "this is not what the exercise asks for, so I have to try again with another method. "
        for i in range(1, 40)
    ),
}
