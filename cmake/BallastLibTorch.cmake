# ballast_find_libtorch(): LibTorch in Torch_DIR, by its own package but for one case. With a CUDA build of PyTorch, which
# is what pip installs by default, that package fails where there is no CUDA toolkit. Programs for the CPU need none, so
# that there the libraries without CUDA are taken instead. Used by the build and by the installed package alike.
#
# Sets Torch_VERSION, TORCH_INSTALL_PREFIX, TORCH_INCLUDE_DIRS, TORCH_LIBRARIES, TORCH_CXX_FLAGS as Torch's package does,
# and BALLAST_LIBTORCH_CUDA: what is built on it may use CUDA.
macro(ballast_find_libtorch)
  set(BALLAST_LIBTORCH_CUDA OFF)
  get_filename_component(ballast_libtorch "${Torch_DIR}/../../.." ABSOLUTE)
  if(EXISTS "${ballast_libtorch}/lib/libtorch_cuda.so")
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_NVCC_EXECUTABLE AND TARGET CUDA::nvrtc)  # what that package asks of a toolkit
      set(BALLAST_LIBTORCH_CUDA ON)
    endif()
  endif()
  if(BALLAST_LIBTORCH_CUDA OR NOT EXISTS "${ballast_libtorch}/lib/libtorch_cuda.so")
    set(kineto_LIBRARY torch)  # inside LibTorch, where Torch's package doesn't look: it would warn that there is none
    find_package(Torch REQUIRED)
  else()
    message(NOTICE "PyTorch in ${ballast_libtorch} is a CUDA build, and there is no CUDA toolkit with nvcc and NVRTC: CPU only")
    include("${Torch_DIR}/TorchConfigVersion.cmake")
    set(Torch_VERSION ${PACKAGE_VERSION})
    set(TORCH_INSTALL_PREFIX ${ballast_libtorch})
    set(TORCH_INCLUDE_DIRS ${ballast_libtorch}/include ${ballast_libtorch}/include/torch/csrc/api/include)
    set(TORCH_LIBRARIES torch_cpu c10)
    if(NOT TARGET torch_cpu)
      foreach(library IN LISTS TORCH_LIBRARIES)
        add_library(${library} SHARED IMPORTED)
        set_target_properties(${library} PROPERTIES IMPORTED_LOCATION ${ballast_libtorch}/lib/lib${library}.so
          INTERFACE_INCLUDE_DIRECTORIES "${TORCH_INCLUDE_DIRS}")
      endforeach()
      set_property(TARGET torch_cpu PROPERTY INTERFACE_COMPILE_DEFINITIONS USE_DISTRIBUTED USE_C10D_GLOO)
      # It needs libraries of CUDA, which lie elsewhere in the Python environment: the loader finds them, GNU ld doesn't.
      set_property(TARGET torch_cpu PROPERTY INTERFACE_LINK_OPTIONS LINKER:--allow-shlib-undefined)
    endif()
  endif()
endmacro()
