#include <cstdio>
#include <nlohmann/json.hpp>

#include "ballast/config/json_text.h"
#include "cli/commands.h"

namespace ballast::cli {

int check_config(const std::filesystem::path& file, const std::vector<std::string>& changes) {
  nlohmann::json root = read_json_file(file);
  for (const std::string& change : changes) apply_change(root, change);
  nlohmann::json effective;
  std::vector<std::string> notices;
  if (is_run_file(root)) {
    const RunFile run = RunFile::from_json(root, file.stem().string());
    effective = run.to_json();
    notices = run.engine.notices;
  } else {
    const Config engine = Config::from_json(root);
    effective = engine.to_json();
    notices = engine.notices;
  }
  for (const std::string& notice : notices) std::printf("note: %s\n", notice.c_str());
  std::printf("%s\n", effective.dump(2).c_str());
  return 0;
}

}  // namespace ballast::cli
