"""``python -m strandline`` is ``strandline``."""

from strandline.cli import main

if __name__ == "__main__":
    main()
