"""JupyterLab in headless Chromium: the notebook of tree shapes runs, and its slider `budget` changes its figures.

The notebook may be another (NOTEBOOK in the environment), as long as it has an ipywidgets slider described "budget"
and shows PNG figures. Needs the extra `browser`, and Chromium with its driver: Debian's chromium and chromium-driver.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = Path(os.environ.get("NOTEBOOK", ROOT / "notebooks/04_tree_shapes.ipynb"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1400,1600",
)
# Waited at most; a slow machine takes minutes to run.
START_SECONDS, RUN_SECONDS, CHANGE_SECONDS = 30, 300, 20
SETTINGS = {
    # Cells that are out of sight stay in the page, so that the test can find them.
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',
    "@jupyterlab/apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
SLIDER = "//*[contains(@class,'widget-slider')][.//label[normalize-space()='budget']]"
HANDLE = SLIDER + "//*[contains(@class,'noUi-handle')]"
RUN_ALL = """
const done = arguments[0];
jupyterapp.commands.execute('notebook:run-all-cells').then(() => done(''), error => done(String(error)));
"""
# Sources of all figures in outputs, once every one of them is loaded; else null.
FIGURES = """
const found = [...document.querySelectorAll('.jp-OutputArea img, .jupyter-widgets img, img.jupyter-widgets')];
return found.every(image => image.complete && image.naturalWidth) ? found.map(image => image.src) : null;
"""
IS_OPEN = "return !!(window.jupyterapp && jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel);"

pytestmark = pytest.mark.browser


def _why_not() -> str:
    """Why this machine cannot run the test; empty when it can."""
    try:
        import jupyterlab  # noqa: F401
        import selenium  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed: the extra `browser` has it"
    if not any(map(shutil.which, BROWSERS)):
        return f"none of {', '.join(BROWSERS)} is installed (Debian: chromium)"
    return "" if shutil.which("chromedriver") else "no chromedriver (Debian: chromium-driver)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a JupyterLab over a copy of the notebook's folder."""
    if reason := _why_not():
        pytest.skip(reason)
    assert NOTEBOOK.exists(), f"{NOTEBOOK.name} is missing"
    scratch = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOK.parent, scratch / "files", ignore=shutil.ignore_patterns(".*"))
    for plugin, values in SETTINGS.items():
        settings = scratch / "settings" / f"{plugin}.jupyterlab-settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(values)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": scratch / "files",
        "ServerApp.allow_root": True,
        "ServerApp.open_browser": False,
        "IdentityProvider.token": token,
        "LabApp.expose_app_in_browser": True,
        "LabApp.user_settings_dir": scratch / "settings",
        "LabApp.workspaces_dir": scratch / "workspaces",
    }
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    folders = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    environment = os.environ | {name: str(scratch / "jupyter") for name in folders}
    environment |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with open(scratch / "log", "w") as log:
        server = subprocess.Popen(command, cwd=scratch, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(lambda: _answers(f"{address}/api/status?token={token}"), START_SECONDS, "JupyterLab starts")
            yield address, token
        except TimeoutError as error:
            pytest.fail(f"{error}:\n{(scratch / 'log').read_text()[-2000:]}")
        finally:
            server.terminate()
            server.wait(20)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _wait(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of a condition. Raises TimeoutError with `what` did not come true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {seconds} s")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A Chromium of its own profile."""
    if reason := _why_not():
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    driver.set_page_load_timeout(START_SECONDS)
    driver.set_script_timeout(RUN_SECONDS)
    yield driver
    with contextlib.suppress(Exception):  # a driver that has died already says so in the test
        driver.quit()


def test_the_budget_slider_changes_the_figures(lab: tuple[str, str], browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    address, token = lab
    browser.get(f"{address}/lab/tree/{NOTEBOOK.name}?reset&token={token}")
    _wait(lambda: browser.execute_script(IS_OPEN), START_SECONDS, "the notebook opens with a kernel")
    assert browser.execute_async_script(RUN_ALL) == ""
    errors = browser.find_elements(By.CSS_SELECTOR, '[data-mime-type="application/vnd.jupyter.error"]')
    assert [error.text for error in errors] == []

    handles = _wait(lambda: browser.find_elements(By.XPATH, HANDLE), CHANGE_SECONDS, "a slider `budget`")
    assert len(handles) == 1
    before = _wait(lambda: browser.execute_script(FIGURES), CHANGE_SECONDS, "a figure")
    value = handles[0].get_attribute("aria-valuenow")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handles[0])
    key = Keys.ARROW_LEFT if value == handles[0].get_attribute("aria-valuemax") else Keys.ARROW_RIGHT
    handles[0].send_keys(key)
    _wait(lambda: handles[0].get_attribute("aria-valuenow") != value, CHANGE_SECONDS, "the slider moves")

    def changed() -> bool:
        now = browser.execute_script(FIGURES)
        return now is not None and len(now) == len(before) and now != before

    _wait(changed, CHANGE_SECONDS, "the figure changes with the budget")
