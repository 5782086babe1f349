// Of programs whose tests all want a CUDA device: they exit with 77 where there is none.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!at::hasCUDA() || at::getNumGPUs() == 0) {
    std::printf("skip: no CUDA device\n");
    return 77;
  }
  return RUN_ALL_TESTS();
}
