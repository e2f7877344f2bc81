"""Takes the README's pictures of the viewer: python docs/screenshots.py, where Chromium and selenium are installed."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

HERE = Path(__file__).parent
PICTURES = (  # file, kept model, width and height in CSS pixels, dots a pixel, colour scheme
    ("view-copy-light.png", "copy-10", 1280, 1080, 1, "light"),
    ("view-reverse-dark.png", "reverse-10", 1280, 1080, 1, "dark"),
)


def take(file: str, model: str, width: int, height: int, dots: int, scheme: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "prism", "view", str(HERE.parent / "models" / model), "--no-open", "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )
    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": dots, "mobile": False})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]})
        driver.get(address)
        while not driver.find_elements(By.CSS_SELECTOR, "canvas"):
            time.sleep(0.2)
        time.sleep(2)
        driver.save_screenshot(str(HERE / file))
    finally:
        driver.quit()
        server.terminate()


if __name__ == "__main__":
    for picture in PICTURES:
        take(*picture)
