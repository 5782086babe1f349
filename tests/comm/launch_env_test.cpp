#include "ballast/comm/launch_env.h"

#include <gtest/gtest.h>

#include <map>

#include "ballast/base/error.h"

namespace ballast {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnv> read(const Variables& variables) {
  return read_launch_env([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const UseError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LaunchEnv, NothingSetMeansOneRank) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}, {"LOCAL_RANK", "1"}}));
}

TEST(LaunchEnv, Torchrun) {
  const auto launch = read({{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"MASTER_ADDR", "node3"},
                            {"MASTER_PORT", "1234"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                            {"TORCHELASTIC_RESTART_COUNT", "2"}});
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->launcher, "torchrun");
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->size, 8);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->host, "node3");
  EXPECT_EQ(launch->port, 1234);
  EXPECT_TRUE(launch->store_is_served);
  EXPECT_EQ(launch->attempt, "2");
}

TEST(LaunchEnv, RanksWithoutMoreMeetOnThisMachine) {
  const auto launch = read({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->local_rank, 0);
  EXPECT_EQ(launch->host, "127.0.0.1");
  EXPECT_EQ(launch->port, 29500);
  EXPECT_FALSE(launch->store_is_served);
  EXPECT_EQ(launch->attempt, "0");
}

TEST(LaunchEnv, Mpirun) {
  Variables variables{{"OMPI_COMM_WORLD_RANK", "3"},
                      {"OMPI_COMM_WORLD_SIZE", "4"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(refusal(variables),
            "[comm.from_env] environment variable MASTER_ADDR is missing (mpirun started 4 ranks on several machines; "
            "set it to the host of rank 0)");
  variables["MASTER_ADDR"] = "node0";
  const auto far = read(variables);
  ASSERT_TRUE(far);
  EXPECT_EQ(far->launcher, "mpirun");
  EXPECT_EQ(far->rank, 3);
  EXPECT_EQ(far->local_rank, 1);
  EXPECT_EQ(far->host, "node0");
  variables.erase("MASTER_ADDR");
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4";
  EXPECT_EQ(read(variables)->host, "127.0.0.1");
}

TEST(LaunchEnv, Srun) {
  Variables variables{{"SLURM_PROCID", "6"},
                      {"SLURM_STEP_NUM_TASKS", "8"},
                      {"SLURM_LOCALID", "2"},
                      {"SLURM_STEP_NODELIST", "node[07-09,12],login"},
                      {"SLURM_JOB_ID", "1234567"}};
  const auto launch = read(variables);
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->launcher, "srun");
  EXPECT_EQ(launch->rank, 6);
  EXPECT_EQ(launch->size, 8);
  EXPECT_EQ(launch->local_rank, 2);
  EXPECT_EQ(launch->host, "node07");
  EXPECT_EQ(launch->port, 29500 + 4567);
  for (const auto& [list, first] : Variables{
           {"a", "a"}, {"a,b", "a"}, {"r[3]", "r3"}, {"r[3,5],b", "r3"}, {"rack[1-2]-a,b", "rack1-a"}, {"r[3", "r"}}) {
    variables["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ(read(variables)->host, first) << list;
  }
  variables.erase("SLURM_STEP_NODELIST");
  EXPECT_NE(refusal(variables).find("MASTER_ADDR is missing (srun started 8 ranks"), std::string::npos);
}

TEST(LaunchEnv, ABatchScriptIsNoRank) {
  EXPECT_FALSE(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "7"}}));
}

TEST(LaunchEnv, TorchrunInsideSlurmOrMpirunWins) {
  const auto launch = read({{"RANK", "1"},
                            {"WORLD_SIZE", "2"},
                            {"SLURM_PROCID", "0"},
                            {"SLURM_STEP_NUM_TASKS", "1"},
                            {"OMPI_COMM_WORLD_RANK", "0"},
                            {"OMPI_COMM_WORLD_SIZE", "1"}});
  EXPECT_EQ(launch->launcher, "torchrun");
  EXPECT_EQ(launch->rank, 1);
}

TEST(LaunchEnv, WrongVariablesAreNamedWithTheirValues) {
  EXPECT_EQ(refusal({{"RANK", "1"}}),
            "[comm.from_env] environment variable WORLD_SIZE is missing (RANK is set, so WORLD_SIZE must be too)");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "2"}}),
            "[comm.from_env] environment variable RANK is missing (WORLD_SIZE is set, so RANK must be too)");
  EXPECT_EQ(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
            "[comm.from_env] environment variable RANK is wrong (RANK=2; allowed: integers from 0 to 1)");
  EXPECT_NE(refusal({{"RANK", "one"}, {"WORLD_SIZE", "2"}}).find("RANK=one"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("WORLD_SIZE=0"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}).find("WORLD_SIZE=2x"), std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "-1"}}).find("LOCAL_RANK=-1"),
            std::string::npos);
  EXPECT_NE(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65536"}}).find("MASTER_PORT=65536"),
            std::string::npos);
}

}  // namespace
}  // namespace ballast
