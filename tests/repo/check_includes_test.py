"""Feeds tools/check_includes.py small trees, each with one breach, and expects exactly that breach."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
import check_includes  # noqa: E402

GOOD = {
    "ballast/base/CMakeLists.txt": "ballast_component(base PUBLIC error.h PCH none SOURCES log.cpp)",
    "ballast/base/error.h": "#include <string>\n",
    "ballast/base/secret.h": "",
    "ballast/base/log.cpp": '#include "ballast/base/secret.h"\n#include <torch/torch.h>\n',
    "ballast/tiers/CMakeLists.txt": "ballast_component(tiers USES base PUBLIC tier.h SOURCES disk.cpp)  # USES grads",
    "ballast/tiers/tier.h": "#include <ATen/core/Tensor.h>\n",
    "ballast/tiers/disk.cpp": '#include "ballast/base/secret.h"\n#include <liburing.h>\n',
    "ballast/grads/CMakeLists.txt": "ballast_component(grads\n  USES tiers\n  SOURCES window.cpp)",
    "ballast/grads/window.cpp": '#include "ballast/tiers/tier.h"\n',
    "ballast/ballast.h": '#include "ballast/base/error.h"\n',
    "examples/train.cpp": "#include <ballast/ballast.h>\n",
}


class CheckIncludes(unittest.TestCase):
    def breaches(self, changed):
        """The breaches of the good tree with some files replaced."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**GOOD, **changed}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return list(check_includes.breaches(root))

    def expect_one(self, start, changed):
        found = self.breaches(changed)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(start), found[0])

    def test_a_good_tree_has_none(self):
        self.assertEqual(self.breaches({}), [])

    def test_a_lower_component_may_not_include_a_higher_one(self):
        self.expect_one(
            "ballast/base/log.cpp:2: includes ballast/tiers/tier.h (base uses: nothing)",
            {"ballast/base/log.cpp": '\n#include "ballast/tiers/tier.h"\n'},
        )

    def test_reaching_a_component_through_another_is_not_permission(self):
        self.expect_one(
            "ballast/grads/window.cpp:1: includes ballast/base/error.h (grads uses: tiers)",
            {"ballast/grads/window.cpp": '#include "ballast/base/error.h"\n'},
        )

    def test_every_folder_declares_its_component(self):
        self.expect_one("ballast/stray/stray.cpp:1: no ballast_component(stray)", {"ballast/stray/stray.cpp": ""})

    def test_components_form_no_cycle(self):
        found = self.breaches(
            {"ballast/base/CMakeLists.txt": "ballast_component(base USES grads PUBLIC error.h SOURCES log.cpp)"}
        )
        self.assertEqual(len(found), 3, found)  # each of the three reaches itself

    def test_no_header_includes_all_of_torch(self):
        self.expect_one(
            "ballast/base/secret.h:1: includes torch/torch.h", {"ballast/base/secret.h": "#include <torch/torch.h>"}
        )

    def test_a_public_header_includes_no_foreign_library(self):
        self.expect_one(
            "ballast/tiers/tier.h:1: includes liburing.h", {"ballast/tiers/tier.h": "#include <liburing.h>"}
        )

    def test_a_public_header_includes_public_ones_only(self):
        self.expect_one(
            "ballast/tiers/tier.h:1: includes ballast/base/secret.h",
            {"ballast/tiers/tier.h": '#include "ballast/base/secret.h"'},
        )

    def test_an_example_includes_public_headers_only(self):
        self.expect_one(
            "examples/train.cpp:1: includes ballast/base/secret.h",
            {"examples/train.cpp": "#include <ballast/base/secret.h>"},
        )

    def test_a_public_header_exists(self):
        self.expect_one(
            "ballast/tiers/CMakeLists.txt:1: PUBLIC names ballast/tiers/gone.h",
            {
                "ballast/tiers/CMakeLists.txt": "ballast_component(tiers USES base PUBLIC tier.h gone.h SOURCES disk.cpp)"
            },
        )


if __name__ == "__main__":
    unittest.main()
