"""Failed checks in the modules of tests/end_to_end tell what they compared."""

import pytest

pytest.register_assert_rewrite("outcome", "yard")
