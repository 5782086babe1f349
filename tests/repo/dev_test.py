"""./dev test in a project of the same form whose programs only note that they were built."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES NONE)
enable_testing()
foreach(name config engine_use engine_cases)
  add_custom_target(test_${name} ALL COMMAND ${CMAKE_COMMAND} -E touch ${CMAKE_BINARY_DIR}/${name})
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -E cat ${CMAKE_BINARY_DIR}/${name})
endforeach()
add_test(NAME install COMMAND ${CMAKE_COMMAND} -E cat ${CMAKE_BINARY_DIR}/engine_use)
add_subdirectory(benchmarks)
add_test(NAME repo_docs COMMAND ${CMAKE_COMMAND} -E true)
"""


BENCHMARKS = r"""foreach(name bench_save bench_load)
  file(WRITE ${CMAKE_CURRENT_SOURCE_DIR}/${name} "#!/bin/sh\necho ran $(basename $0)\n")
  add_custom_target(${name} COMMAND install -m 755 ${CMAKE_CURRENT_SOURCE_DIR}/${name} ${CMAKE_CURRENT_BINARY_DIR})
endforeach()
"""


class DevTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in ("dev", "CMakePresets.json"):
            shutil.copy(ROOT / name, self.root)
        shutil.copytree(ROOT / "tools", self.root / "tools")
        (self.root / "CMakeLists.txt").write_text(PROJECT)

        (self.root / "benchmarks").mkdir()
        (self.root / "benchmarks/CMakeLists.txt").write_text(BENCHMARKS)

    def run_dev(self, *words):
        environment = {**os.environ, "BALLAST_PYTHON": sys.argv[1] if len(sys.argv) > 1 else sys.executable}
        done = subprocess.run([self.root / "dev", *words], env=environment, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr

    def dev(self, *words):
        return self.run_dev("test", *words)

    def built(self, preset="dev"):
        folder = self.root / "build" / preset
        return [name for name in ("config", "engine_use", "engine_cases") if (folder / name).exists()]

    def expect(self, words, built, tests):
        status, output = self.dev(*words)
        self.assertEqual(status, 0, output)
        self.assertEqual(self.built(), built)
        self.assertRegex(output, rf"100% tests passed.* out of {tests}\n")

    def test_builds_only_the_program_of_the_test_that_is_named(self):
        self.expect(["config"], ["config"], 1)

    def test_takes_the_name_of_the_program_too(self):
        self.expect(["test_engine_use"], ["engine_use"], 1)

    def test_takes_several_names_and_expressions_and_options(self):
        self.expect(["^engine", "config", "-V"], ["config", "engine_use", "engine_cases"], 3)

    def test_builds_nothing_for_what_reads_the_sources(self):
        self.expect(["repo"], [], 1)

    def test_builds_everything_for_a_test_without_a_program_of_its_own(self):
        self.expect(["install"], ["config", "engine_use", "engine_cases"], 1)

    def test_builds_and_runs_everything_without_a_name(self):
        self.expect([], ["config", "engine_use", "engine_cases"], 5)

    def test_lists_without_a_build(self):
        status, output = self.dev("engine", "-N")
        self.assertEqual(status, 0, output)
        self.assertIn("Total Tests: 2", output)
        self.assertEqual(self.built(), [])

    def test_refuses_a_name_that_nothing_has_before_it_builds(self):
        status, output = self.dev("config", "engin3")
        self.assertEqual(status, 1)
        self.assertIn(
            "dev: no test matches engin3\n     they are: config engine_use engine_cases install repo_docs\n", output
        )
        self.assertEqual(self.built(), [])

    def test_sees_a_test_that_was_added_since(self):
        self.expect(["config"], ["config"], 1)
        (self.root / "CMakeLists.txt").write_text(PROJECT + "add_test(NAME late COMMAND ${CMAKE_COMMAND} -E true)\n")
        self.expect(["late"], ["config", "engine_use", "engine_cases"], 1)

    def test_takes_a_preset(self):
        status, output = self.dev("-p", "release", "config")
        self.assertEqual(status, 0, output)
        self.assertEqual(self.built("release"), ["config"])
        self.assertEqual(self.built(), [])

    def test_takes_a_preset_behind_names_and_options(self):
        status, output = self.dev("config", "-V", "-p", "release")
        self.assertEqual(status, 0, output)
        self.assertEqual(self.built("release"), ["config"])
        self.assertEqual(self.built(), [])
        status, output = self.dev("config", "-p", "nosuch")
        self.assertEqual(status, 1)
        self.assertIn("dev: no preset 'nosuch'\n", output)

    def test_builds_and_runs_the_benchmarks_that_are_named(self):
        status, output = self.run_dev("bench", "save")
        self.assertEqual(status, 0, output)
        self.assertIn("ran bench_save\n", output)
        self.assertNotIn("load", output)

    def test_refuses_a_benchmark_that_is_none_before_it_builds(self):
        status, output = self.run_dev("bench", "nosuch")
        self.assertEqual(status, 1)
        self.assertIn("dev: no benchmark matches 'nosuch'\n     they are: bench_load bench_save\n", output)
        self.assertFalse((self.root / "build/release/benchmarks/bench_save").exists())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
