"""``python -m strandline.cli`` is ``strandline``."""

from strandline.cli import main

if __name__ == "__main__":
    main()
