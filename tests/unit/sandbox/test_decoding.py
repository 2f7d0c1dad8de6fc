"""Tests of decoding: marks, zeros, right and wrong declarations, and detection without any."""

import codecs

import pytest

from permille.sandbox.decoding import UnreadableError, decode

RUSSIAN = "Сегодня мы собрали яблоки и посадили морковь."
JAPANESE = "今日は庭でトマトを植えました。"


@pytest.mark.parametrize(
    ("mark", "codec"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_decides_against_any_declaration(mark: bytes, codec: str) -> None:
    text, charset = decode(mark + JAPANESE.encode(codec), "iso-8859-1")
    assert text == JAPANESE
    assert codec.startswith(charset)


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["The plums ripened early.", f"{RUSSIAN}\n", f"{JAPANESE}\n{JAPANESE}"])
def test_zeros_show_utf_16_and_utf_32_without_a_mark(codec: str, text: str) -> None:
    assert decode(text.encode(codec)) == (text, codec)


def test_a_cut_end_costs_no_other_character() -> None:
    assert decode("﻿one two".encode("utf-16-le") + b"x")[0].startswith("one two")


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("iso-8859-1", "cp1252", "“Größe” – naïve"),
        ("us-ascii", "cp1252", "Größe"),
        ('"KOI8-R"', "koi8_r", RUSSIAN),
        ("x-sjis", "cp932", f"{JAPANESE}①"),
        ("windows-31j", "cp932", JAPANESE),
        ("gb2312", "gb18030", "今天镕"),
        ("ks_c_5601-1987", "cp949", "오늘 정원"),
        ("iso-2022-jp", "iso2022_jp", JAPANESE),
        ("hz-gb-2312", "hz", "今天"),
        ("utf-7", "utf-7", "Größe"),
        ("cp850", "cp850", "Größe"),
    ],
)
def test_a_declared_charset_is_used_by_all_its_names(label: str, codec: str, text: str) -> None:
    assert decode(text.encode(codec), label)[0] == text


@pytest.mark.parametrize("label", ["iso-8859-1", "gb2312", "x-unknown", "base64", "utf-16", "", None])
def test_utf_8_is_read_under_a_wrong_name(label: str | None) -> None:
    assert decode(JAPANESE.encode(), label) == (JAPANESE, "utf-8")


@pytest.mark.parametrize("label", ["iso-8859-1", "shift_jis", None])
def test_a_few_wrong_bytes_cost_utf_8_no_other_character(label: str | None) -> None:
    appended, cut = f"{RUSSIAN}\nGrößer\n", f"{RUSSIAN} “ß”"
    assert decode(RUSSIAN.encode() + "\nGrößer\n".encode("cp1252"), label) == (appended, "damaged utf-8")
    assert decode(cut.encode()[:-1], label) == (f"{cut[:-1]}\ufffd", "damaged utf-8")


@pytest.mark.parametrize("label", ["x-unknown", "unknown-8bit", "base64", "utf-16", "utf-8", None])
@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("cp1252", "L'été dernier, à la forêt – l’œuvre était très belle, même à Noël."),
        ("cp1252", "Heute haben wir Äpfel gepflückt und Möhren gesät."),
        ("cp1252", "Mañana iré al jardín, ¿vendrás también?"),
        ("mac_roman", "Café déjà vu – größer"),
        ("mac_roman", "Tänään kävin pellolla, ja löysin mustikoita metsästä."),
        ("cp850", "Heute haben wir Äpfel gepflückt und Möhren gesät."),
        ("cp850", "GRÖSSE UND MÜHE, ÜBERALL ÄRGER"),
        ("cp850", "┌──────┐\n│Größe │\n└──────┘"),
        ("cp850", "Amanhã não vou à horta. O feijão já está maduro."),
        ("cp437", "Mañana iré al jardín, ¿vendrás también?"),
        ("cp850", "Været var dårlig, så vi gikk hjem før det ble mørkt."),
        ("cp852", "Dziś posadziliśmy pomidory, żółte i śliczne, w ogródku."),
        ("cp1250", "Dnes jsme sázeli rajčata a řepu, žížaly jsou všude. Příště více."),
        ("iso8859_2", "Dziś posadziliśmy pomidory, żółte i śliczne, w ogródku."),
        ("cp1254", "Bugün bahçeye domates diktik, yağmur yağıyor, şeker gibi."),
        ("koi8_r", RUSSIAN),
        ("cp1251", RUSSIAN),
        ("cp932", JAPANESE),
        ("euc_jp", JAPANESE),
        ("gb18030", "今天我们在花园里种了西红柿，下雨了。"),
        ("cp949", "오늘은 정원에 토마토를 심었습니다. 비가 옵니다."),
        ("cp949", "그래ㅋㅋㅋㅋㅋㅋ 내일 봐 ㅠㅠ"),
        ("cp932", "私は火曜日にエンドウ豆を植えました。"),
        ("cp932", "ﾄﾏﾄ と きゅうり"),
        ("euc_jp", "会議は来週の月曜日に延期"),
        ("gb18030", "妻子剪了几枝玫瑰，放在花"),
        ("big5", "我星期二種了豌豆，一週內就發芽了。"),
    ],
)
def test_a_charset_that_nothing_names_is_detected(codec: str, text: str, label: str | None) -> None:
    assert decode(text.encode(codec), label)[0] == text


@pytest.mark.parametrize("codec", ["utf-8", "cp1252", "euc_jp"])
def test_blocks_of_zeros_that_a_crash_leaves_cost_no_text(codec: str) -> None:
    text = JAPANESE * 9 if codec == "euc_jp" else "Die Äpfel für Jörg sind süß.\n" * 9
    data = text.encode(codec)
    for broken in (data + bytes(4096), bytes(4095) + data, data[:58] + bytes(512) + data[58:]):
        assert decode(broken) == (text, codec)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(50), b"\x7fELF\2\1\1" + bytes(9)])
def test_bytes_that_are_no_text_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableError, match="no text"):
        decode(data)
