"""A program that draws a map, figures and events with the demos' screen, for tests of it in terminals."""

from __future__ import annotations

import sys
import time

from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.placement.locate import Placement
from skymemory.text import flowed, has_colour
from skymemory_lab.demo.screen import Screen
from skymemory_lab.view.layout_map import LEGEND, OrbitFrame, render_frame

FRAMES, FRAME_S = 40, 0.05
EVENT = "a value is missed: it is computed again, and stored as soon as the sky can take it"


def main() -> None:
    placement = Placement.of("rotation_hop", 10, Torus(5, 19), SatelliteId(2, 9))
    screen = Screen(sys.stdout, time.monotonic(), line_every_s=0.5)
    colour = has_colour(sys.stdout)
    try:
        screen.say("the drawing begins")
        for number in range(FRAMES):
            frame = OrbitFrame(placement, (0, 0), (number, 0))
            if number % 10 == 5:
                screen.say(f"event {number}: {EVENT}")
            screen.show(
                lambda width, frame=frame: [*render_frame(frame, colour, width), *flowed(LEGEND, width)],
                [f"frame {number} of {FRAMES}", "figures " * 18],
            )
            time.sleep(FRAME_S)
    finally:
        screen.close()
    print("the end")


if __name__ == "__main__":
    main()
