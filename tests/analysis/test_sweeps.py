import csv
import html.parser
import json
import math

import pytest

from analysis.report import main, remarks, report_page
from analysis.statistics import kendall_tau, mean, paired
from analysis.sweeps import SweepError, loss_sentences, markdown_table, read_sweep
from tests.analysis.sweep_folder import write_sweep


def test_a_paired_difference_ignores_what_seeds_share():
    baseline = {0: 1.0, 1: 5.0, 2: 9.0, 3: 2.0}
    values = {0: 1.4, 1: 5.6, 2: 9.5, 7: 0.0}
    difference = paired(values, baseline)
    assert difference is not None
    assert difference.count == 3
    assert difference.mean == pytest.approx(0.5)
    # Student's t with two degrees of freedom, 97.5 %: 4.3027; standard deviation 0.1.
    assert difference.high - difference.mean == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert paired({1: 2.0}, {2: 2.0}) is None
    assert math.isnan(paired({1: 2.0}, {1: 1.0}).low)


def test_a_mean_has_the_standard_error_of_its_seeds():
    value = mean([1.0, 3.0])
    assert (value.mean, value.standard_error) == (2.0, 1.0)
    assert math.isnan(mean([1.0]).standard_error)
    assert kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)


def test_a_sweep_is_read_by_variant_and_seed(tmp_path):
    records = read_sweep(write_sweep(tmp_path))
    assert [variant.name for variant in records.variants] == ["plain", "slow", "huge"]
    slow = records.variant("slow")
    assert slow.by_seed("last_evaluation_loss") == pytest.approx({0: 2.5, 1: 3.51, 2: 4.52})
    difference = records.difference(slow, "last_evaluation_loss")
    assert difference.mean == pytest.approx(0.51)
    assert 0.4 < difference.low < difference.high < 0.6
    assert records.order_agreement() == 1.0
    # Of plan.json, for the tokens that the steps had.
    assert records.step_seconds() == [("plain", 1.1, 1.0), ("slow", pytest.approx(1.9), 2.0)]


def test_a_loss_one_per_cent_worse_is_excluded_or_not(tmp_path):
    records = read_sweep(write_sweep(tmp_path))
    (line,) = loss_sentences(records)
    # 0.51 of a mean of 3.0, from 0.485 to 0.535.
    assert line.startswith("held-out loss of slow against plain, 3 pairs: +17.00 % (+16.17 to +17.83 %")
    assert line.endswith("which does not exclude a loss 1 % worse.")


def test_what_does_not_fit_stands_in_the_table_with_the_planner_s_words(tmp_path):
    lines = markdown_table(read_sweep(write_sweep(tmp_path))).splitlines()
    assert "0 of 3" in lines[4]
    assert "infeasible: no plan" in lines[4]
    assert "+0.51 [" in lines[3]
    assert all(line.replace("\\|", "").count("|") == lines[0].count("|") for line in lines)


def test_runs_of_different_commits_are_refused_unless_asked_for(tmp_path):
    folder = write_sweep(tmp_path, commits=("abc", "def"))
    with pytest.raises(SweepError, match=r"abc .*def .*--mixed"):
        read_sweep(folder)
    assert len(read_sweep(folder, mixed=True).trials) == 9


class Page(html.parser.HTMLParser):
    """Tags that are open, and every address that the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.cells += tag == "td"
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself(tmp_path):
    page = Page()
    text = report_page(read_sweep(write_sweep(tmp_path)))
    page.feed(text)
    assert page.open == []
    assert page.cells > 12
    assert len(page.addresses) >= 5
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "<script" not in text
    # The planner's words have the room of all columns that have nothing to say.
    assert '<td colspan="4">infeasible: no plan | fits</td>' in text


def test_the_command_writes_a_page_and_two_tables(tmp_path, capsys):
    folder = write_sweep(tmp_path)
    main([str(folder), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "report.html")
    rows = list(csv.DictReader((tmp_path / "out" / "trials.csv").read_text().splitlines()))
    assert len(rows) == 9
    assert rows[0]["last_evaluation_loss"] == "2.0"
    assert rows[-1]["state"] == "infeasible"
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Kendall's tau 1.00" in text
    assert "3 infeasible" in text


@pytest.mark.parametrize("damage", ["missing", "no JSON"])
def test_a_damaged_folder_is_one_message(tmp_path, damage, capsys):
    folder = write_sweep(tmp_path)
    if damage == "missing":
        (folder / "sweep.json").unlink()
    else:
        (folder / "sweep.json").write_text("{")
    with pytest.raises(SystemExit):
        main([str(folder)])
    assert "sweep.json" in capsys.readouterr().err


def test_remarks_count_what_is_still_to_do(tmp_path):
    folder = write_sweep(tmp_path)
    (folder / "outcomes" / "slow2.json").unlink()
    assert any("1 planned" in line for line in remarks(read_sweep(folder)))
    assert json.loads((folder / "sweep.json").read_text())["name"] == "tried"
