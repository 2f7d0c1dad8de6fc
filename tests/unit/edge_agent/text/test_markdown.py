"""Tests of notes in Markdown: only YAML keys are front matter, and links become their words."""

import pytest

from permille_agent.text.markdown import split_front_matter, without_targets


@pytest.mark.parametrize(
    "front",
    [
        "---\ntitle: Peas\n---\n",
        "---\r\ntags:\r\n  - a\r\n- b\r\naliases: []\r\n---\r\n".replace("\r\n", "\n"),
        "---\nsummary: >-\n  two lines\n  of text\ndate created: 2024-05-01\n...\n",
        '---\n"created": 2024-05-01\n\nДата: 1\ntext: |\n  one\n\n  two\n---\n',
        "---\n'tags': a\nlayout.kind: post\n---\n",
        '+++\ntitle = "Peas"\ntags = [\n  "a",\n]\n\n[extra]\nx.y = 1\n+++\n',
        '---\ntags: [a,\n  b\n]\nurl: "https://example.org"\n---',
    ],
)
def test_a_block_of_keys_at_the_beginning_is_front_matter(front: str) -> None:
    assert split_front_matter(f"{front}Text") == (
        ("", f"{front}Text") if front.endswith("---") else (front, "Text")
    )
    assert split_front_matter(front) == (front, "")


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nToday I planted peas.\n\n---\n\nEvening: rain.\n",
        "---\nToday I planted peas: two rows.\n---\nMore.\n",
        "---\nPeas\n---\n",
        "---\nMorning: sun\nEvening: rain fell\n---\nMore.\n",
        "---\nDay: one\n\nPlanted peas.\n---\n",
        "---\nday: one\n\nPlanted peas.\n\n---\n",
        "---\nday: one\nPlanted peas.\n---\n",
        "---\n- a list\n---\n",
        "---\ntitle: never closed\n\nText\n",
        "---\n---\nText\n",
        "Text\n---\ntitle: Peas\n---\n",
        "+++\nPeas = good.\nI planted them.\n+++\n",
        "--- \ntext ---\n",
        "----\ntitle: Peas\n----\n",
        "---\n" + "a b: c d\n" * 5000,
    ],
)
def test_text_between_rules_is_no_front_matter(text: str) -> None:
    assert split_front_matter(text) == ("", text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("See [[2024-05-01|the first of May]] and [[Beans]].", "See the first of May and Beans."),
        ("![[Pasted image 2024.png]]\nThe bed.", "\nThe bed."),
        ("![our bed](images/a(1).png) and [the shop](https://example.org/a_(b)).", "our bed and the shop."),
        ("A thought. ^a1b2", "A thought."),
        (f"One ![bed](data:image/png;base64,{'A' * 9000}) two.", "One  two."),
        (f'One <img alt="bed" src="data:image/png;base64,{"A" * 9000}"/> two.', "One  two."),
        (f"One ![][image1] two.\n\n[image1]: <data:image/png;base64,{'A' * 9000}>\n", "One  two.\n\n"),
        ("See [[Bed 7#^a1b2]] and [[#Soil]].", "See Bed 7 and #Soil."),
        ("> [!tip]- Peas\n> in rows", "> Peas\n> in rows"),
        (
            "[Peas][p] and ![Beans][]; [x][y]\n\n[P]: <https://a.org/b> 'p'\n[beans]: /b.png\n",
            "Peas and Beans; [x][y]\n\n",
        ),
        ("Note[^1]\n\n[^1]: https://a.org\n[Jo]: yes\n", "Note[^1]\n\n[^1]: https://a.org\n[Jo]: yes\n"),
        ("# Bed\n\n%%\n# Drawing\n```json\nN4KAkARAL\n```\n%%\nLast", "# Bed\n\n\nLast"),
        (
            "50%% sure\n%% a %% b\n```matlab\n%% A\nx\n%% B\n```",
            "50%% sure\n%% a %% b\n```matlab\n%% A\nx\n%% B\n```",
        ),
        ("`[[ -f x ]]` and [x] done", "`[[ -f x ]]` and [x] done"),
        ("```sh\n[[ -f x ]] && [a](b)\n```\n[a](b)", "```sh\n[[ -f x ]] && [a](b)\n```\na"),
        ("*early* # not ^ this", "*early* # not ^ this"),
        ("%% open\n[a](b)\n%% [[c|d]]\nend", "%% open\na\n%% d\nend"),
        # To look for the end of each comment would take hours.
        ("%% a\n" * 200_000, "%% a\n" * 200_000),
        ("[" * 20_000 + "(" * 20_000, "[" * 20_000 + "(" * 20_000),
    ],
)
def test_links_become_their_words_and_code_stays(text: str, words: str) -> None:
    assert without_targets(text) == words
