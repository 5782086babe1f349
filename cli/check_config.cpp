#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>

#include "ballast/base/log.h"
#include "ballast/config/json_text.h"
#include "ballast/engine/policies.h"
#include "cli/commands.h"

namespace ballast::cli {
namespace {

/// What an engine refuses that has the right keys: on one rank, and the batch on any number of them.
void check_engine(const Config& engine, const std::string& at) {
  check_batch(engine, at);
  static_cast<void>(make_policies(engine, 1));
}

}  // namespace

int check_config(const std::filesystem::path& file, const std::vector<std::string>& changes) {
  nlohmann::json root = read_json_file(file);
  for (const std::string& change : changes) apply_change(root, change);
  nlohmann::json effective;
  std::vector<std::string> notices;
  if (is_run_file(root)) {
    const RunFile run = RunFile::from_json(root, file.stem().string());
    check_engine(run.engine, "engine.");
    effective = run.to_json();
    notices = run.engine.notices;
    if (std::error_code ignored; !std::filesystem::exists(run.data.path, ignored))
      log_warning("nothing there (data.path = ", run.data.path,
                  "; relative to where the command runs; training will end "
                  "with an error)");
  } else {
    const Config engine = Config::from_json(root);
    check_engine(engine, "");
    effective = engine.to_json();
    notices = engine.notices;
  }
  for (const std::string& notice : notices) std::printf("note: %s\n", notice.c_str());
  std::printf("%s\n", effective.dump(2).c_str());
  return 0;
}

}  // namespace ballast::cli
