# The include folder, LibTorch and its flags, for every target of the project. A target of its own, so that the
# precompiled headers below are compiled with exactly the flags of the files that reuse them.
add_library(ballast_options INTERFACE)
target_include_directories(ballast_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
target_include_directories(ballast_options SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_compile_options(ballast_options INTERFACE ${TORCH_CXX_FLAGS})
target_compile_definitions(ballast_options INTERFACE $<TARGET_PROPERTY:torch_cpu,INTERFACE_COMPILE_DEFINITIONS>)
target_link_libraries(ballast_options INTERFACE nlohmann_json::nlohmann_json Threads::Threads)

# Two precompiled headers: ATen for the engine's components, all of torch for what uses torch::nn. A source that needs
# neither sets PCH none. (ATen.h costs 7 CPU seconds a file, torch.h 13; with these 2 and 5.)
foreach(kind aten torch)
  file(WRITE ${CMAKE_BINARY_DIR}/pch/${kind}.cpp "")
  add_library(ballast_pch_${kind} OBJECT ${CMAKE_BINARY_DIR}/pch/${kind}.cpp)
  target_link_libraries(ballast_pch_${kind} PRIVATE ballast_options)
endforeach()
target_precompile_headers(ballast_pch_aten PRIVATE <ATen/ATen.h> <nlohmann/json.hpp>)
target_precompile_headers(ballast_pch_torch PRIVATE <torch/torch.h> <nlohmann/json.hpp>)

function(ballast_use_pch target kind)
  if(NOT kind STREQUAL "none")
    target_precompile_headers(${target} REUSE_FROM ballast_pch_${kind})
    # The headers are compiled with -fPIC; CMake gives programs -fPIE, and then g++ leaves the header unused.
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${target} PRIVATE -fPIC)
    endif()
  endif()
endfunction()

# ballast_component(NAME USES other... [PUBLIC header...] [PCH aten|torch|none] SOURCES file...): one object library per
# component. USES is the whole list of components that it may include, PUBLIC the headers that are installed, and
# tools/check_includes.py holds the sources to both.
define_property(GLOBAL PROPERTY BALLAST_COMPONENTS BRIEF_DOCS "components" FULL_DOCS "object libraries of the library")
define_property(GLOBAL PROPERTY BALLAST_PUBLIC_HEADERS BRIEF_DOCS "headers" FULL_DOCS "installed, relative to the root")
function(ballast_component name)
  cmake_parse_arguments(arg "" "PCH" "USES;PUBLIC;SOURCES" ${ARGN})
  add_library(ballast_${name} OBJECT ${arg_SOURCES})
  target_link_libraries(ballast_${name} PUBLIC ballast_options)
  foreach(other IN LISTS arg_USES)
    target_link_libraries(ballast_${name} PUBLIC ballast_${other})
  endforeach()
  if(arg_PCH)
    ballast_use_pch(ballast_${name} ${arg_PCH})
  endif()
  set_property(GLOBAL APPEND PROPERTY BALLAST_COMPONENTS ballast_${name})
  list(TRANSFORM arg_PUBLIC PREPEND ballast/${name}/)
  set_property(GLOBAL APPEND PROPERTY BALLAST_PUBLIC_HEADERS ${arg_PUBLIC})
endfunction()

# ballast_test(NAME SOURCES file... [PCH kind] [TIMEOUT seconds] [LABELS ...]): one GoogleTest program, one ctest entry.
# Exit status 77 means: cannot run here, and the output says why.
function(ballast_test name)
  cmake_parse_arguments(arg "" "PCH;TIMEOUT" "SOURCES;LABELS" ${ARGN})
  if(NOT arg_PCH)
    set(arg_PCH torch)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(test_${name} ${arg_SOURCES})
  target_link_libraries(test_${name} PRIVATE ballast_options ballast GTest::gtest GTest::gtest_main)
  ballast_use_pch(test_${name} ${arg_PCH})
  add_test(NAME ${name} COMMAND test_${name})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
endfunction()

# ballast_benchmark(NAME SOURCES file... [PCH kind]): a program that prints ratios measured side by side; not a test.
function(ballast_benchmark name)
  cmake_parse_arguments(arg "" "PCH" "SOURCES" ${ARGN})
  if(NOT arg_PCH)
    set(arg_PCH torch)
  endif()
  add_executable(bench_${name} ${arg_SOURCES})
  target_link_libraries(bench_${name} PRIVATE ballast_options ballast)
  ballast_use_pch(bench_${name} ${arg_PCH})
endfunction()
