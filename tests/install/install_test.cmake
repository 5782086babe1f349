# Run by ctest with -P: installs BUILD into WORK/prefix, builds SOURCE/examples against it and runs what came out.
function(run)
  string(JOIN " " shown ${ARGN})
  message(STATUS "${shown}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "ended with ${status}: ${shown}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect pattern)
  if(NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "the output lacks: ${pattern}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

set(flags "")
if(SANITIZE)
  set(flags "-fsanitize=${SANITIZE}")  # a sanitized library needs a sanitized program
endif()
run(${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${WORK}/examples -G Ninja -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_CXX_FLAGS=${flags}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/examples)

run(${WORK}/examples/caller_owned)
expect("window 99: applied after 1 backwards")
if(PYTHON AND NOT SANITIZE)
  run(${PYTHON} -m torch.distributed.run --standalone --nproc_per_node 2 --no-python ${WORK}/examples/caller_owned)
  expect("window 99: applied after 1 backwards")
endif()
if(EXISTS ${WORK}/prefix/bin/ballast)
  run(${WORK}/prefix/bin/ballast --version)
endif()
